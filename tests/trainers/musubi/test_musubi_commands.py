"""`plan`, `doctor` and `simulate` of musubi-tuner's configs and of clips."""

import json

import pytest

from kohya_bucket.cli import subjects
from kohya_bucket.images import clips as headers_clip
from tests.clip_files import make_clip, with_cover
from tests.command_line import command_line
from tests.pictures import make_pictures

pytest.importorskip("av", minversion="16")
__all__ = ["command_line"]


@pytest.fixture
def config(tmp_path):
    """Clips of 30, 49 and 5 frames at 24, 30 and 24 per second, and two images."""
    for name, frames, size, fps in [("a", 30, (96, 64), 24), ("b", 49, (64, 96), 30), ("c", 5, (96, 64), 24)]:
        make_clip(tmp_path / "clips" / f"{name}.mp4", frames, size, fps).with_suffix(".txt").write_text("a caption")
    make_pictures(tmp_path / "images", [(96, 64), (200, 90)], "a caption")
    file = tmp_path / "musubi.toml"
    clips, images = (tmp_path / "clips").as_posix(), (tmp_path / "images").as_posix()
    file.write_text(
        "[general]\nresolution = [96, 64]\ncaption_extension = '.txt'\nenable_bucket = true\n"
        f"[[datasets]]\nvideo_directory = '{clips}'\ntarget_frames = [9, 25]\nframe_extraction = 'chunk'\n"
        f"[[datasets]]\nimage_directory = '{images}'\nnum_repeats = 2\n",
        encoding="utf-8",
    )
    return file


def test_plan(config, command_line):
    code, out, _ = command_line("plan", config, "--arch", "wan", "--gpus", "1,2", "--json", "--images")
    assert code == 0
    found = json.loads(out)
    clips, images = found["datasets"]
    buckets = {tuple(row["bucket"]): row["items"] for row in clips["buckets"]}
    assert buckets == {(96, 64, 9): 3, (96, 64, 25): 1, (64, 96, 9): 5, (64, 96, 25): 1}
    assert (clips["frames"], clips["frames_kept"]) == (84, 72)
    assert clips["seconds_lost"] == pytest.approx(3 / 24 + 4 / 30 + 5 / 24, abs=1e-6)
    assert [row["path"][-5:] for row in clips["not_trained"]] == ["c.mp4"]
    a, b, _ = clips["rows"]
    assert (a["items"], a["kept"], a["dropped"], a["counted"]) == ([9, 9, 9, 25], 27, 3, False)
    assert (b["bucket"], b["fps"]) == ([64, 96], 30.0)
    assert (images["items"], images["samples"]) == (2, 4)
    assert [(row["gpus"], row["steps"], row["missed"]) for row in found["gpus"]] == [(1, 14, 0), (2, 7, 0)]
    assert {f["code"] for f in found["findings"]} == {"too-short", "source-fps"}


def test_a_model_whose_tokens_count_is_the_model(config, command_line):
    with open(config, "a", encoding="utf-8") as file:
        file.write("[kohya_bucket]\nmodel = 'wan-14b'\n")
    named = [json.loads(command_line("plan", config, *arch, "--json")[1]) for arch in ([], ["--arch", "wan"])]
    assert named[0] == named[1]
    assert named[0]["architecture"] == "wan"


@pytest.mark.parametrize("images", [True, False])
def test_without_a_model_what_depends_on_it_is_not_planned_and_not_called_a_stop(config, command_line, images):
    text = config.read_text(encoding="utf-8").replace("frame_extraction", "source_fps = 24.0\nframe_extraction")
    config.write_text(text if images else text.rpartition("[[datasets]]")[0], encoding="utf-8")
    code, out, err = command_line("plan", config)
    assert code == 1
    assert "how many frames are left depends on the model, which is not named: name it" in out
    assert "not planned, because of that: dataset 1" in out + err
    assert "musubi-tuner stops" not in out
    assert "nothing found that would stop the training" in "".join(command_line("doctor", config, "--quick")[1:])
    for command in (["analyze"], ["simulate", "96x64x30"]):
        code, _, err = command_line(*command, "--config", config)
        assert code == 2
        assert "depends on the model" in err


def test_clips_that_break_off_and_that_begin_with_a_cover_are_named(config, command_line, tmp_path):
    whole = make_clip(tmp_path / "whole.mkv", 40, (96, 64))
    (tmp_path / "clips" / "cut.mkv").write_bytes(whole.read_bytes()[: whole.stat().st_size * 6 // 10])
    with_cover(tmp_path / "clips" / "covered.mkv", whole)
    for name in ("cut", "covered"):
        (tmp_path / "clips" / f"{name}.txt").write_text("a caption", encoding="utf-8")
    code, out, _ = command_line("plan", config, "--arch", "wan", "--json", "--images")
    assert code == 0
    found = json.loads(out)
    (flaw,) = (one for one in found["findings"] if one["code"] == "clip-flaws")
    assert (flaw["severity"], flaw["count"]) == ("warning", 2)
    covered, cut = sorted(flaw["names"])
    assert "covered.mkv its first video stream, which trainers decode, is not the one that plays" in covered
    assert "cut.mkv breaks off after " in cut
    rows = {row["path"].rpartition("/")[2]: row for row in found["datasets"][0]["rows"]}
    assert (rows["covered.mkv"]["size"], rows["covered.mkv"]["items"]) == ([32, 32], [])  # as the trainer decodes it
    assert "2 clips" not in command_line("analyze", tmp_path / "clips" / "a.mp4")[1]
    assert "cut.mkv breaks off after" in command_line("analyze", tmp_path / "clips")[1]
    assert "breaks off after" in command_line("simulate", tmp_path / "clips" / "cut.mkv", "--arch", "wan")[1]


def test_plan_as_a_table(config, command_line):
    code, out, _ = command_line("plan", config, "--arch", "wan", "--images")
    assert code == 0
    for text in ("Dataset 1: clips, 96x64, buckets, for Wan", "96x64x25", "idle without kohya_bucket",
                 "10 items with 72 of 84 frames; 12 in none (0.5 s)", "fewer frames than the shortest length",
                 "Wan trains 16 frames per second; 3 clips have 24, 30"):  # fmt: skip
        assert text in out
    assert command_line("plan", config, "--arch", "wan", "--strict")[0] == 1
    code, _, err = command_line("plan", config, "--resolution", "512")
    assert (code, err.count("\n")) == (2, 1)
    assert "is a config of musubi-tuner, which says all of that itself: leave out --resolution" in err


def test_a_config_that_stops_is_not_planned(config, command_line):
    config.write_text(config.read_text().replace("[9, 25]", "9"))
    code, out, _ = command_line("plan", config)
    assert code == 1
    assert "target_frames is 9" in out


def test_options_that_caches_cannot_have_are_refused_as_in_training(config, command_line):
    text = config.read_text()
    config.write_text(text + "[kohya_bucket]\nrule = 'exact'\n")
    code, out, _ = command_line("plan", config, "--arch", "wan")
    assert code == 1
    assert "rule is set, but musubi-tuner trains from caches that were made without it" in out
    config.write_text(text + "[kohya_bucket]\nmodel = 'wan-1.3b'\nmax_tokens = 200\n")
    code, out, _ = command_line("plan", config, "--arch", "wan", "--json")
    assert code == 0
    assert json.loads(out)["gpus"][0]["steps"] < 14


def test_a_remedy_is_for_what_it_stands_with(config, command_line, tmp_path):
    lines = [{"video_path": str(tmp_path / "clips" / name), "caption": "a"} for name in ("c.mp4", "gone.mp4")]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    keys = f"video_jsonl_file = '{(tmp_path / 'list.jsonl').as_posix()}'\ncache_directory = 'k'\ntarget_frames = [9]\n"
    config.write_text(f"[[datasets]]\nresolution = [96, 64]\n{keys}", encoding="utf-8")
    found = json.loads(command_line("plan", config, "--arch", "wan", "--json")[1])
    remedies = {finding["code"]: finding["remedy"] for finding in found["findings"]}
    assert remedies["too-short"] == "list a shorter length, or leave them out"
    assert remedies["not-trained"] == "correct the path"


def test_doctor(config, command_line, tmp_path):
    (tmp_path / "images" / "9.png").write_bytes((tmp_path / "images" / "1.png").read_bytes()[:-60])
    (tmp_path / "images" / "9.txt").write_text("a caption")
    clip = tmp_path / "clips" / "a.mp4"
    make_clip(clip, 40, (96, 64), options={"movflags": "+faststart"})
    clip.write_bytes(clip.read_bytes()[: -clip.stat().st_size // 4])
    code, out, _ = command_line("doctor", config, "--arch", "wan", "--json")
    assert code == 1  # musubi-tuner stops at the image
    section = json.loads(out)["sections"][0]
    codes = {finding["code"]: finding["message"] for finding in section["findings"]}
    assert "a.mp4: cannot be decoded as a video after" in codes["not-trained"]
    assert "1 image that cannot be" in codes["undecodable"]
    assert "counted" not in codes
    facts = {fact["name"]: fact["text"] for fact in section["facts"]}
    assert (facts["decoded"].split(" of")[0], facts["decoded clips"]) == ("3 images, 1", "3")
    assert command_line("doctor", config, "--resolution", "512")[0] == 2


def test_simulate_a_clip(config, command_line, tmp_path):
    clip = tmp_path / "clips" / "b.mp4"
    code, out, _ = command_line("simulate", clip, "--arch", "wan", "--resolution", "96,64", "--source-fps", "30",
                                "--target-frames", "9,25", "--json")  # fmt: skip
    assert code == 0
    (row,) = json.loads(out)
    assert row["settings"] == "96x64 for Wan"
    told = row["clip"]
    assert (told["frames_in_file"], told["frames"], told["items"]) == (49, 26, [[0, 9], [0, 25]])
    assert told["buckets"] == [[64, 96, 9], [64, 96, 25]]
    assert told["seconds_lost"] == pytest.approx(49 / 30 / 26)
    code, out, _ = command_line("simulate", clip, "--config", config, "--arch", "wan")
    assert code == 0
    for text in ("64x96, aspect 0.6667, in dataset 1 (96x64 for Wan)", "49 at 30 per second, 1.63 s",
                 "6 in 64x96x9, 64x96x25: frames 9 from 0", "45 of 49 frames; 4 in no item (0.13 s)"):  # fmt: skip
        assert text in out


def test_simulate_sizes(command_line, config):
    code, out, _ = command_line("simulate", "1280x720x81", "--arch", "wan", "--target-frames", "1,25")
    assert code == 0
    assert "in 960x544 for Wan" in out
    assert "2 in 960x544x1, 960x544x25: frames 1 from 0, 25 from 0" in out
    assert "1 in 576x448x81: frames 81 from 0" in command_line("simulate", "600x450x84")[1]
    code, out, _ = command_line("simulate", "64x64x9", "--target-frames", "25")
    assert code == 1
    assert "none: it has fewer frames than the shortest length asked for" in out
    assert "208x96" in command_line("simulate", "200x90", "--arch", "zi", "--resolution", "144")[1]
    assert "in dataset 2 (96x64 for" in command_line("simulate", "200x90", "--config", config)[1]


def test_analyze(config, command_line, tmp_path):
    code, out, _ = command_line("analyze", config, "--arch", "wan", "--json")
    assert code == 0
    clips, images = json.loads(out)["datasets"]
    assert clips["clips"] == {
        "clips": 3, "frames_in_files": 84, "seconds": pytest.approx(30 / 24 + 49 / 30 + 5 / 24), "counted": 0,
        "rotated": 0, "flawed": 0, "items": 10, "frames": 84, "frames_kept": 72,
        "seconds_lost": pytest.approx(3 / 24 + 4 / 30 + 5 / 24),
        "buckets": [{"bucket": [*shape], "items": n} for shape, n in
                    [((64, 96, 9), 5), ((64, 96, 25), 1), ((96, 64, 9), 3), ((96, 64, 25), 1)]],
    }  # fmt: skip
    assert (images["clips"], images["images"]["samples_per_epoch"]) == (None, 4)
    out = command_line("analyze", config, "--arch", "wan")[1]
    assert "10 items with 72 of 84 frames; 0.5 s in no item; 1 clip too short for any" in out
    assert "MusubiTunerBuckets((96, 64), steps=16, no_upscale=False), batch size 1" in out
    page = tmp_path / "report.html"
    assert command_line("analyze", config, "--arch", "wan", "--html", page)[0] == 0
    assert '"items":10}' in page.read_text(encoding="utf-8")
    code, out, _ = command_line("analyze", tmp_path, "--resolution", "256")
    assert code == 0
    assert "2 images, 2 of them in 1 bucket" in out
    assert "3 clips, 3 of them in" in out
    assert "84 frames in 3.1 s; a clip has 5 to 49 of them (median 30), 24, 30 per second" in out


def test_clips_beside_images_are_not_left_out_in_silence(config, command_line, tmp_path, monkeypatch):
    monkeypatch.setattr(subjects.importlib.util, "find_spec", lambda _: None)
    code, out, err = command_line("analyze", tmp_path)
    assert code == 0
    assert "clips:" not in out
    assert "3 clips left out: PyAV, which reads them, is not installed: pip install av" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("640x480", "--target-frames", "25"), "--target-frames: for clips, and this is an image"),
        (("640x480x9", "--target-frames", "1,99999999999999999999"), "from 1 to"),
        (("640x480x9", "--target-frames", "25;3"), "from 1 to"),
        (("640x480x9", "--source-fps", "30"), "name the model whose rate it is brought to"),
        (("640x480", "--arch", "zi", "--rule", "auto"), "--arch places as musubi-tuner does: leave out --rule"),
        (("640x480x9", "--arch", "zi"), "Z-Image trains no clips in musubi-tuner"),
        (("640x480x0",), "width, height and frames must be 1 or more"),
        (("none.mp4",), "none.mp4 cannot be read as a clip: no such file"),
        (("640x480x99999999999",), "a clip can have at most 10,000,000"),
    ],
)
def test_mistakes_are_one_line(command_line, arguments, words):
    code, _, err = command_line("simulate", *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert words in err


def test_a_hostile_frame_is_not_decoded(tmp_path, monkeypatch, command_line):
    clip = make_clip(tmp_path / "a.mp4", 5)
    monkeypatch.setattr(headers_clip, "pixel_limit", lambda: 1000)
    code, _, err = command_line("simulate", clip)
    assert code == 2
    assert "64x48 pixels in a frame, more than 1,000" in err


@pytest.mark.parametrize("command", [("plan",), ("doctor", "--quick"), ("analyze", "--config")])
def test_a_config_that_cannot_be_read_is_what_is_wrong_and_not_the_model(command, tmp_path, command_line):
    for name, content, why in [
        ("gone.toml", None, "does not exist"),
        ("broken.toml", b"[general\n", "line 1"),
        ("latin.toml", b"# caf\xe9\n", "not UTF-8"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        code, _, error = command_line(*command, tmp_path / name, "--arch", "wan")
        assert (code, error.count("kohya-bucket: ")) == (2, 1)
        assert why in error
        assert "--arch" not in error
