"""What is said of musubi-tuner's configs. That they are read as it does: `compat_tests/test_musubi_configs_real.py`."""

import glob
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.token_grids import TOKEN_GRIDS
from kohya_bucket.trainers.door.findings import Severity
from kohya_bucket.trainers.musubi.architectures import ANY, ARCHITECTURES, OF_TOKENS
from kohya_bucket.trainers.musubi.config import is_musubi, read_config, why_not_cached_in
from kohya_bucket.trainers.musubi.families import architecture_named
from kohya_bucket.trainers.musubi.keys import ClipKeys, ImageKeys
from kohya_bucket.trainers.musubi.listing import list_items
from tests.pictures import make_pictures

CLIPS = "[[datasets]]\nvideo_directory = 'v'\ncaption_extension = '.txt'\nenable_bucket = true\n"


def read(tmp_path, text, arch="wan"):
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="utf-8")
    return read_config(file, ANY if arch is None else ARCHITECTURES[arch])


def said(config):
    return {f.code: f.text for f in config.findings}


def test_keys_of_general_and_of_each_data_set(tmp_path):
    text = (
        "[general]\nresolution = 512\nbatch_size = 3\ncaption_extension = '.cap'\nenable_bucket = true\n"
        "[[datasets]]\nvideo_directory = 'v'\ntarget_frames = [25, 1]\nsource_fps = 30.0\nbatch_size = 1\n"
        "[[datasets]]\nimage_jsonl_file = 'i.jsonl'\ncache_directory = 'c'\nresolution = [960, 544]\n"
    )
    config = read(tmp_path, text)
    clips, images = config.datasets
    assert isinstance(clips, ClipKeys)
    assert isinstance(images, ImageKeys)
    assert (clips.resolution, clips.batch_size, clips.target_frames, clips.caches) == ((512, 512), 1, (25, 1), "v")
    assert (images.resolution, images.batch_size, images.caption_extension) == ((960, 544), 3, ".cap")
    assert config.places == ("line 6, dataset 1", "line 11, dataset 2")
    assert [f.code for f in config.findings] == []


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("target_frame = [1]", "unknown-key", "'target_frames'?"),
        ("multiple_target = true", "misplaced-key", "move it to a dataset of images"),
        ("source_fps = 30", "wrong-type", "source_fps is 30, but must be a number with a decimal point, e.g. 30.0"),
        ("target_frames = 25", "wrong-type", "must be a list of whole numbers"),
        ("frame_extraction = 'heads'", "frame-extraction", "chunk, slide, uniform, full; nearest: head"),
        ("target_frames = [0]", "frames", "no frames follow from one of these"),
        ("target_frames = [1000000000000000000000000]", "frames", "give numbers from 1 to 1,000,000"),
        ("source_fps = 0.0", "frames", "a rate above 0"),
        ("batch_size = 0", "batch-size", "batch_size is 0"),
        ("batch_size = false", "batch-size", "batch_size is 0"),
        ("resolution = 0", "resolution", "must be sides of 1 to 1,000,000 pixels"),
        ("resolution = [512, 2000000000]", "resolution", "must be sides of 1 to 1,000,000 pixels"),
        ("target_frames = [30, 31]", "target-frames", "are rounded to [29]: Wan takes 4n+1 frames"),
        ("bucket_no_upscale = true", "clip-buckets", "as the newest musubi-tuner places them; up to 0.3.4"),
        ("num_repeats = 0", "no-repeats", "nothing of it is trained"),
        ("[dataset]", "unknown-key", "beside [general] and [[datasets]] there is nothing: did you mean 'datasets'?"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, line, code, words):
    assert words in said(read(tmp_path, CLIPS + line + "\n"))[code]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("target_frames = [4, 22]", "frames", "MiniMax-H3 needs 5 frames or more"),
        ("target_frames = [22, 30]", "target-frames", "are rounded to [22]: MiniMax-H3 takes 17n+5 frames"),
        ("target_frames = [22]\nsource_fps = 30.0", "source-fps", "are brought to 24 frames per second by their times"),
        ("target_frames = [22]\nbatch_size = 2", "batch-size", "trains one item at a time"),
    ],
)
def test_what_is_different_for_minimax_h3(tmp_path, line, code, words):
    assert words in said(read(tmp_path, CLIPS + line + "\n", "mmh3"))[code]


def test_clips_of_minimax_h3_last_as_long_as_before():
    """Frames are dropped or repeated to reach 24 a second."""
    keys, model = ClipKeys((512, 512), True, target_frames=(5, 22, 40), frame_extraction="chunk"), ARCHITECTURES["mmh3"]
    rates = keys.rates(model, np.array([24.0, 48.0, 12.0, 0.0]))
    placed = keys.clip_rule(model).place([(640, 360)] * 4, [44, 44, 22, 44], rates)
    assert placed.frames.tolist() == [44, 22, 44, 44]
    assert {tuple(size) for size in placed.picture.bucket_sizes.tolist()} == {(672, 384)}
    assert set(placed.spans.length.tolist()) == {5, 22, 39}
    assert model.grid.latent_frames([5, 22, 39]).tolist() == [2, 7, 12]


@pytest.mark.parametrize("hands_on", [True, False])
def test_where_clips_go_depends_on_the_checkout(tmp_path, hands_on):
    """The version of a trainer that is named by its path is known."""
    package = tmp_path / "src" / "musubi_tuner"
    (package / "dataset").mkdir(parents=True)
    given = "self.enable_bucket" if hands_on else ""
    code = f"class VideoDataset:\n def retrieve_latent_cache_batches(self):\n  return BucketSelector({given})\n"
    (package / "dataset" / "image_video_dataset.py").write_text(code, encoding="utf-8")
    (tmp_path / "wan_train_network.py").touch()
    wan = architecture_named(str(tmp_path / "wan_train_network.py"))
    file = tmp_path / "c.toml"
    placed = {}
    for text in (CLIPS, CLIPS + "bucket_no_upscale = true\n", CLIPS.replace("true", "false")):
        file.write_text(text, encoding="utf-8")
        config = read_config(file, wan)
        placed[text] = config.datasets[0].picture_rule(wan).place([(480, 270), (270, 480)]).bucket_sizes.tolist()
        assert "clip-buckets" not in said(config)
        assert ("clips-without-buckets" in said(config)) is ("false" in text and not hands_on)
    in_buckets, kept, one_size = placed.values()
    assert in_buckets == [[960, 544], [544, 960]]
    assert kept == ([[480, 256], [256, 480]] if hands_on else in_buckets)
    assert one_size == ([[960, 544]] * 2 if hands_on else in_buckets)


@pytest.mark.posix("a link, which Windows does not let everyone make")
def test_no_two_data_sets_have_one_cache_folder_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "cd":
        Path(name).mkdir()
    Path("link").symlink_to("c")
    draws, any_case = random.Random(0), Path("D").is_dir()
    for _ in range(100):
        spellings = draws.choices(["c", "c/", "./c", "d/../c", "link", "link/", "C", "d", "e/f", "e//f", "e"], k=3)
        real = [os.path.realpath(one).lower() if any_case else os.path.realpath(one) for one in spellings]
        refused = why_not_cached_in(spellings)
        assert [one is not None for one in refused] == [real.count(one) > 1 for one in real], spellings


@pytest.mark.parametrize("folder", ["a[1]", "a[1", "a]", "[b]/c", "[!]"])
def test_a_cache_folder_in_which_glob_finds_nothing(tmp_path, folder):
    cache = tmp_path / folder
    cache.mkdir(parents=True)
    (cache / "a_qi.safetensors").touch()
    found = glob.glob(f"{cache}/*_qi.safetensors")  # noqa: PTH207  (as musubi-tuner looks for caches)
    assert (why_not_cached_in([str(cache)]) == [None]) == bool(found)


def test_data_sets_that_exclude_each_other_and_keys_that_are_missing(tmp_path):
    assert "is the cache folder of 2 datasets" in said(read(tmp_path, CLIPS + CLIPS))["shared-cache"]
    found = said(read(tmp_path, "[[datasets]]\nvideo_jsonl_file = 'v.jsonl'\n"))
    assert "set cache_directory" in found["no-cache-directory"]
    assert "every clip is cut to 960x544: for buckets, set enable_bucket = true" in found["one-size"]
    assert "set caption_extension" not in found
    assert "names no images and no clips" in said(read(tmp_path, "[[datasets]]\nresolution = 512\n"))["no-source"]
    found = said(read(tmp_path, "[general]\nsource_fps = 1.0\n" + CLIPS))
    assert "[general]: move it to a dataset of clips" in found["misplaced-key"]
    with pytest.raises(ConfigError, match=r"there is no \[\[datasets\]\] in it"):
        read(tmp_path, "[general]\nresolution = 512\n")


def test_models(tmp_path):
    assert "Z-Image trains no clips in musubi-tuner" in said(read(tmp_path, CLIPS, "zi"))["no-clips"]
    unknown = read(tmp_path, CLIPS + "source_fps = 30.0", None)
    assert (
        "depends on the model, which is not named: name it, e.g. --arch wan, or model = "
        in said(unknown)["needs-model"]
    )
    assert not unknown.findings.of(Severity.ERROR)  # nothing at which musubi-tuner would stop
    for tokens, short in OF_TOKENS.items():
        table = f"source_fps = 30.0\n[kohya_bucket]\nmodel = '{tokens}'"
        assert read(tmp_path, CLIPS + table, None).model is ARCHITECTURES[short]
        assert read(tmp_path, CLIPS + table, "fp").model is ARCHITECTURES["fp"]  # what is named wins
        assert tokens in TOKEN_GRIDS
    for name in ("wan", "WAN", "wan_train_network.py", "src/musubi_tuner/wan_train_network.py"):
        assert architecture_named(name) is ARCHITECTURES["wan"]
    for name, short in [("hunyuan_video", "hv"), ("hv_train.py", "hv"), ("hv_1_5_train_network.py", "hv15"),
                        ("FLUX.1 Kontext", "fk"), ("zimage_train.py", "zi")]:  # fmt: skip
        assert architecture_named(name).name == short
    for wrong in ("wam", "", "train.py"):
        with pytest.raises(ConfigError, match="must be a family of musubi-tuner"):
            architecture_named(wrong)


def test_whose_config_it_is():
    assert is_musubi({"datasets": [{"video_directory": "v"}]})
    assert is_musubi({"general": {}, "datasets": [{}, {"image_jsonl_file": "v"}]})
    assert is_musubi({"datasets": [{"subsets": [{"image_directory": "i"}]}]})
    for key in ("image_directory", "cache_directory"):
        assert is_musubi({"datasets": [{key: "x", "subsets": [{"image_dir": "x"}]}]})
    for other in ({}, None, [], {"datasets": 3}, {"datasets": [3]}, {"datasets": [{"resolution": 512}]},
                  {"datasets": [{"subsets": [{"image_dir": "x", "cache_directory": "c"}]}]}):  # fmt: skip
        assert not is_musubi(other)


def test_images_without_a_caption_are_left_out_and_named(tmp_path):
    make_pictures(tmp_path / "i", [(64, 64)] * 3, "a caption")
    (tmp_path / "i" / "1.txt").unlink()
    (tmp_path / "i" / ".hidden.png").touch()
    (tmp_path / "i" / "0.Png").touch()
    folder = (tmp_path / "i").as_posix()
    config = read(tmp_path, f"[[datasets]]\nimage_directory = '{folder}'\ncaption_extension = '.txt'\n")
    paths = list_items(config.datasets[0], "dataset 1", config.findings).paths
    assert [Path(path).name for path in paths] == ["0.png", "2.png"]
    assert (
        "1 of 3 images has no '.txt' file, so musubi-tuner leaves out what has none (before 0.3.0 it stops there)"
        in said(config)["missing-captions"]
    )
    (tmp_path / "i").rename(tmp_path / "j")
    list_items(config.datasets[0], "dataset 1", config.findings)
    assert "missing-folder" in said(config)


def test_images_in_subfolders_are_named_unless_the_config_has_the_folder(tmp_path):
    for name in ("i", "i/named", "i/control", "i/cache", "i/other", "i/other/deeper"):
        make_pictures(tmp_path / name, [(64, 64)], "a caption")
    folder = (tmp_path / "i").as_posix()
    config = read(
        tmp_path,
        f"[general]\ncaption_extension = '.txt'\n[[datasets]]\nimage_directory = '{folder}'\n"
        f"control_directory = '{folder}/control'\ncache_directory = '{folder}/cache'\n"
        f"[[datasets]]\nimage_directory = '{folder}/named'\n",
    )
    list_items(config.datasets[0], "dataset 1", config.findings, folders=config.folders)
    (finding,) = (f for f in config.findings if f.code == "subfolders")
    assert finding.names == (str(tmp_path / "i" / "other" / "0.png"),)
    assert finding.remedy == "to train them, name each folder in a [[datasets]] of its own"


def test_lists_that_hold_nothing(tmp_path):
    list_file = tmp_path / "i.jsonl"
    for text, found in (
        ("", {"no-items": "is left of"}),
        ("[]", {"not-lines": "a list of 0 values", "no-items": ""}),
        ('{"image_path": "a.png", "caption": ""},\n', {"bad-line": "stops: column ", "no-items": ""}),
    ):
        list_file.write_text(text, encoding="utf-8")
        config = read(tmp_path, f"[[datasets]]\nimage_jsonl_file = '{list_file.as_posix()}'\ncache_directory = 'c'\n")
        list_items(config.datasets[0], "dataset 1", config.findings)
        messages = said(config)
        assert all(part in messages[code] for code, part in found.items())
        remedy = next(f.remedy for f in config.findings if f.code == "no-items")
        assert remedy == ("see the other findings" if text else "it is empty")


def test_lines_of_a_list(tmp_path):
    rows = [
        {"video_path": "a.mp4", "caption": "x"},
        {"video_path": "x/a.mp4", "caption": "x", "control_path": "c.mp4"},
        {"caption": "x"},
        {"video_path": "b.mp4"},
        [1],
        {"video_path": "c.mp4", "caption": "a smile, cut \ud83d"},
    ]
    list_file = tmp_path / "v.jsonl"
    list_file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    (tmp_path / "a.mp4").touch()  # beside the list, and not here
    config = read(tmp_path, f"[[datasets]]\nvideo_jsonl_file = '{list_file.as_posix()}'\ncache_directory = 'c'\n")
    paths = list_items(config.datasets[0], "dataset 1", config.findings).paths
    assert paths == [str(tmp_path / "a.mp4"), "x/a.mp4"]
    wrong = [f.message.split(" of ")[0] for f in config.findings if f.code == "bad-line"]
    assert wrong == ["line 3", "line 4", "line 5", "line 6"]
    controls = [f.message for f in config.findings if f.code == "missing-control-image"]
    assert [text.partition(" control ")[0] for text in controls] == ["1 of 2 items without a", "1"]  # that of line 1
    assert "share names" in said(config)["shared-names"]


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "n" * 300], ids=ascii)
def test_a_folder_of_a_name_that_none_can_have_is_no_folder_of_the_config(tmp_path, name):
    data = {"datasets": [{"image_directory": name, "cache_directory": name}]}
    (tmp_path / "c.json").write_text(json.dumps(data), encoding="utf-8")
    config = read_config(tmp_path / "c.json")
    assert len(config.folders) == 1
    assert list_items(config.datasets[0], "dataset 1", config.findings).paths == []
    assert "missing-folder" in {finding.code for finding in config.findings}
