"""`kohya-bucket compare` of clips."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.errors import KohyaBucketError
from tests.clip_files import make_clip

pytest.importorskip("av", reason="clips are read by PyAV")

MODEL = ["--arch", "wan", "--resolution", "128,72"]


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    make_clip(folder / "long.mp4", 60, (128, 72), 30)
    make_clip(folder / "short.mp4", 7, (72, 128), 16)
    (folder / "broken.mp4").write_bytes(b"no clip")
    return folder


def run(*arguments) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_every_rule_over_a_folder(clips) -> None:
    (told,) = json.loads(run(clips, *MODEL, "--target-frames", "1,25", "--json"))
    assert (told["clips"], told["unreadable"]) == (2, 1)
    rules = {rule.pop("rule"): rule for rule in told["rules"]}
    assert list(rules) == ["musubi-tuner", "diffusion-pipe"]
    short = {"it has fewer frames than the shortest length asked for": 1}
    assert rules["musubi-tuner"] | {"mean_crop": 0, "seconds_lost": 0} == {
        "buckets": 3, "items": 3, "frames_kept": 26, "frames_dropped": 13, "seconds_lost": 0, "unplaced": 0,
        "mean_crop": 0, "reasons": {},
    }  # fmt: skip
    # of 32 and 7 frames at 16 per second: 7 of the first's, which lasts 2 s, and the other whole
    assert rules["diffusion-pipe"]["seconds_lost"] == pytest.approx(2 * 7 / 32 + 7 / 16)
    assert (rules["diffusion-pipe"]["frames_kept"], rules["diffusion-pipe"]["reasons"]) == (25, short)
    text = run(clips, *MODEL, "--target-frames", "1,25")
    assert "2 clips of " in text
    assert "(1 unreadable left out), 128x72 for Wan, frames 16 per second" in text
    assert "diffusion-pipe: 1 without a bucket: it has fewer frames" in text


def test_a_config_and_a_folder_of_clips_alone(clips, tmp_path) -> None:
    config = tmp_path / "c.toml"
    table = "[[datasets]]\nresolution = [128, 72]\nenable_bucket = true\ncaption_extension = '.txt'\n"
    config.write_text(f"{table}video_directory = '{clips.as_posix()}'\ntarget_frames = [25]\n", encoding="utf-8")
    text = run(config, "--arch", "wan", "--rules", "musubi-tuner")
    assert "dataset 1" in text
    assert "diffusion-pipe" not in text
    assert "HiDream-O1 and MiniMax-H3, frames as in the file" in run(clips, "--resolution", "128,72")
    assert "for any model" in run(clips / "long.mp4")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--arch", "wan", "--rules", "kohya"], "rule for clips is 'kohya'"),
        (["--arch", "wan", "--rules", ","], "--rules is ','"),
        (["--arch", "wan", "--batch-size", "2"], "leave out --batch-size"),
        (["--arch", "wan", "--bucket-no-upscale"], "leave out --bucket-no-upscale"),
        (["--target-frames", "1;2"], "--target-frames is '1;2'"),
        (["--arch", "wam"], "--arch is 'wam'"),
    ],
)
def test_what_does_not_count_for_clips_is_refused(clips, options, said) -> None:
    with pytest.raises(KohyaBucketError, match=said):
        run(clips, *options)


def test_images_beside_clips_are_compared_as_before(clips, tmp_path) -> None:
    Image.new("RGB", (600, 400)).save(tmp_path / "a.png")
    with pytest.raises(KohyaBucketError, match="no clips found there"):
        run(tmp_path, "--arch", "wan")
    shutil.copy(clips / "long.mp4", tmp_path)
    left_out, counted = run(tmp_path, "--rules", "kohya").splitlines()[:2]
    assert left_out == "1 clip left out: --arch, e.g. --arch wan, compares clips instead of images"
    assert counted.startswith("1 image of")
    assert "1 clip of" in run(tmp_path, *MODEL)
