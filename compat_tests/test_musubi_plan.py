"""Items, buckets and batches of `plan` against musubi-tuner's own datasets (MUSUBI_DIR), on clips and images."""

import collections
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from kohya_bucket.trainers.door.findings import Severity
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.musubi.architectures import ARCHITECTURES
from kohya_bucket.trainers.musubi.config import read_config
from kohya_bucket.trainers.musubi.families import architecture_named
from kohya_bucket.trainers.musubi.plan import overview
from tests.clip_files import make_clip

pytest.importorskip("av")

HERE = Path(__file__).resolve().parent
CLIPS = [
    ("a.mp4", 30, (96, 64), 24), ("b.mkv", 49, (64, 96), 30), ("c.webm", 5, (128, 64), 24), ("d.avi", 81, (96, 96), 16),
    ("e.MOV", 25, (160, 90), 23.976), ("f.mp4", 1, (96, 64), 24), ("g.mp4", 100, (96, 60), 60),
]  # fmt: skip
GENERAL = "[general]\nresolution = [96, 64]\ncaption_extension = '.txt'\nbatch_size = 2\nenable_bucket = true\n"


@pytest.fixture(scope="module")
def source():
    for package in ("torch", "safetensors", "einops", "toml", "cv2"):
        pytest.importorskip(package)
    return Path(os.environ["MUSUBI_DIR"]).resolve() / "src"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Clips of several containers, a folder of frames, images, each with a caption."""
    folder = tmp_path_factory.mktemp("data")
    for name, frames, size, fps in CLIPS:
        path = folder / "clips" / name
        made = make_clip(path.with_suffix(path.suffix.lower()), frames, size, fps)
        made.rename(path)
        path.with_suffix(".txt").write_text("a caption", encoding="utf-8")
    (folder / "frames").mkdir()
    for i in range(33):
        Image.new("RGB", (90, 70), (i, 0, 0)).save(folder / "frames" / f"{i:03d}.png")
    (folder / "images").mkdir()
    sizes = [(96, 64), (64, 96), (200, 100), (33, 44), (97, 61), (500, 400), (96, 96), (15, 300), (40, 40)]
    for i, size in enumerate(sizes):
        Image.new("RGB", size).save(folder / "images" / f"im{i}.{'jpg' if i % 2 else 'png'}")
        if i != 3:
            (folder / "images" / f"im{i}.txt").write_text("a caption", encoding="utf-8")
    return folder


TRAINERS = {"wan": "wan_train_network", "hv": "hv_train_network", "fp": "fpack_train_network",
            "zi": "zimage_train_network", "ho1": "hidream_o1_train"}  # fmt: skip


def plan(source, config, architecture):
    trainer = source / "musubi_tuner" / f"{TRAINERS[architecture]}.py"
    read = read_config(config, architecture_named(str(trainer)))
    return read, overview(read, AdapterOptions())


def theirs(source, config, architecture):
    spec, out = config.with_suffix(".json"), config.with_suffix(".out")
    spec.write_text(json.dumps({"config": str(config), "architecture": architecture, "out": str(out)}))
    environment = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HERE / "musubi_plan_script.py"), str(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def stops_at_an_image_without_a_caption(source):
    """Whether this musubi-tuner, as those before 0.3.0, lists images without looking at their captions."""
    listing = (source / "musubi_tuner" / "dataset" / "image_video_dataset.py").read_text(encoding="utf-8")
    return "glob_images(self.image_directory)" in listing


def item_of(cache):
    """The item's name: that of its cache without size and architecture, and of a clip with its first frame."""
    return re.sub(r"_\d{4,}x\d{4,}_\w+\.safetensors$", "", cache)


def compare(source, config, architecture):
    """How many items there are, and the config; for Wan, buckets of images have a number more, one for all."""
    read, seen = plan(source, config, architecture)
    expected = theirs(source, config, architecture)
    assert "error" not in expected, expected
    compared = 0
    for mine, cached, other in zip(seen.datasets, expected["cached"], expected["trained"], strict=True):
        of_clips = mine.clips is not None
        names = [name if of_clips else Path(name).stem for name in mine.items.keys]
        assert sorted(names) == sorted({item_of(name) for name in cached})
        buckets = {}
        for name, k, times in zip(names, mine.items.bucket_ids, mine.items.repeats.tolist(), strict=True):
            buckets.setdefault(mine.items.bucket_keys[k], []).extend([name] * times)
        found = {tuple(key[: 3 if of_clips else 2]): collections.Counter(map(item_of, items))
                 for key, items in other["buckets"]}  # fmt: skip
        assert {key: collections.Counter(items) for key, items in buckets.items()} == found
        assert sum(row.batches for row in mine.rows) == other["batches"]
        compared += len(names)
    return compared, read


WAYS = {
    "head": "target_frames = [1, 25, 45]",
    "chunk": "target_frames = [25, 9]\nframe_extraction = 'chunk'",
    "slide": "target_frames = [1, 17]\nframe_extraction = 'slide'\nframe_stride = 10",
    "uniform": "target_frames = [1, 25]\nframe_extraction = 'uniform'\nframe_sample = 4",
    "full": "frame_extraction = 'full'\nmax_frames = 81",
    "rate": "target_frames = [9, 25]\nframe_extraction = 'chunk'\nsource_fps = 30.0",
    "slow": "target_frames = [1, 25]\nsource_fps = 12.0\nnum_repeats = 3",
    "defaults": "",
}


def clips_config(folder, data, keys):
    (folder / "cache").mkdir()
    config = folder / "clips.toml"
    places = f"video_directory = '{data / 'clips'}'\ncache_directory = '{folder / 'cache'}'\n"
    config.write_text(f"{GENERAL}[[datasets]]\n{places}{keys}", encoding="utf-8")
    return config


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["wan", "hv", "fp"])
@pytest.mark.parametrize("way", list(WAYS))
def test_clips(source, data, tmp_path, way, architecture):
    window = "fp_latent_window_size = 1\n" if architecture == "fp" else ""
    frames = WAYS[way].replace("[1, ", "[5, ") if architecture == "fp" else WAYS[way]
    if architecture == "fp" and way in ("full", "defaults"):
        frames = "target_frames = [5, 21]"
    config = clips_config(tmp_path, data, window + frames)
    compared, read = compare(source, config, architecture)
    assert compared > 4
    assert not read.findings.of(Severity.ERROR)


def cached_by_plan(seen):
    """(item, width, height) of the first dataset."""
    items = seen.datasets[0].items
    return {(name, *items.bucket_keys[k][:2]) for name, k in zip(items.keys, items.bucket_ids, strict=True)}


def names_of_caches(names, family):
    found = [re.fullmatch(rf"(.+)_(\d+)x(\d+)_{family}\.safetensors", name).groups() for name in names]
    return {(name, int(width), int(height)) for name, width, height in found}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["target_frames = [5, 22, 40]", "target_frames = [5]\nframe_extraction = 'chunk'"])
def test_clips_of_minimax_h3(source, data, tmp_path, way):
    """Brought to 24 frames per second by their times, from whatever rate."""
    if not (source / "musubi_tuner" / "dataset" / "audio_utils.py").is_file():
        pytest.skip("this version does not train MiniMax-H3")
    config = clips_config(tmp_path, data, f"batch_size = 1\n{way}")
    read = read_config(config, ARCHITECTURES["mmh3"])
    expected = theirs(source, config, "mmh3")["cached"][0]
    assert cached_by_plan(overview(read, AdapterOptions())) == names_of_caches(expected, "mmh3")
    assert len(expected) > 8
    assert not read.findings.of(Severity.ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["enable_bucket = false", "bucket_no_upscale = true\nresolution = [128, 96]"])
def test_clips_whose_buckets_depend_on_the_version(source, data, tmp_path, keys):
    """They are compared with what is cached: older versions train clips in other buckets than they cache them in."""
    config = clips_config(tmp_path, data, f"target_frames = [1, 25]\n{keys}")
    _, seen = plan(source, config, "wan")
    expected = theirs(source, config, "wan")["cached"][0]
    assert cached_by_plan(seen) == names_of_caches(expected, "wan")
    assert len(expected) > 8


@pytest.mark.slow
def test_a_list_with_a_folder_of_frames_beside_images(source, data, tmp_path):
    rows = [data / "clips" / "a.mp4", data / "frames", data / "clips" / "e.MOV"]
    (tmp_path / "clips.jsonl").write_text(
        "".join(json.dumps({"video_path": str(row), "caption": "a caption"}) + "\n" for row in rows), encoding="utf-8"
    )
    for name in ("c1", "c2", "c3"):
        (tmp_path / name).mkdir()
    images = shutil.copytree(data / "images", tmp_path / "images")
    sets = [
        f"video_jsonl_file = '{tmp_path / 'clips.jsonl'}'\ncache_directory = '{tmp_path / 'c1'}'\n"
        "target_frames = [1, 25]\nnum_repeats = 2\nresolution = 64",
        f"image_directory = '{images}'\ncache_directory = '{tmp_path / 'c2'}'\nresolution = [128, 128]",
        f"image_directory = '{images}'\ncache_directory = '{tmp_path / 'c3'}'\nenable_bucket = false",
    ]
    config = tmp_path / "both.toml"
    config.write_text(GENERAL + "".join(f"[[datasets]]\n{one}\n" for one in sets), encoding="utf-8")
    assert [f.code for f in plan(source, config, "wan")[0].findings.of(Severity.WARNING)] == [
        "missing-captions",
        "missing-captions",
        "short-batches",
    ]
    if stops_at_an_image_without_a_caption(source):
        assert "im3.txt" in theirs(source, config, "wan")["error"]
        (images / "im3.jpg").unlink()
    compared, _ = compare(source, config, "wan")
    assert compared == 3 + 3 + 8 + 8


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["zi", "ho1"])
def test_images_that_are_not_enlarged(source, data, tmp_path, architecture):
    trainer = {"zi": "zimage_train_network", "ho1": "hidream_o1_train"}[architecture]
    if not (source / "musubi_tuner" / f"{trainer}.py").is_file():
        pytest.skip(f"this version has no {trainer}")
    (tmp_path / "cache").mkdir()
    config = tmp_path / "images.toml"
    text = f"{GENERAL}[[datasets]]\nimage_directory = '{data / 'images'}'\ncache_directory = '{tmp_path / 'cache'}'\n"
    config.write_text(text.replace("[96, 64]", "192") + "bucket_no_upscale = true", encoding="utf-8")
    _, seen = plan(source, config, architecture)
    assert [Path(path).name for path, _ in seen.datasets[0].left_out] == ["im7.jpg"]  # 15 pixels wide
    (data / "images" / "im7.txt").rename(data / "images" / "im7.hidden")
    try:
        compared, _ = compare(source, config, architecture)
    finally:
        (data / "images" / "im7.hidden").rename(data / "images" / "im7.txt")
    assert compared == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("frame_extraction = 'heads'", "frame-extraction", "frame_extraction heads is not supported"),
        ("target_frames = []", "frames", "max"),
        ("source_fps = 0.0", "frames", "ZeroDivisionError"),
        ("frame_extraction = 'slide'\nframe_stride = 0", "frames", "range"),
        ("caption_extension = '.caption'", "caption-extension", "No such file"),
    ],
)
def test_what_it_stops_at_is_an_error(source, data, tmp_path, line, code, words):
    config = clips_config(tmp_path, data, line)
    read = read_config(config, ARCHITECTURES["wan"])
    if not read.findings.of(Severity.ERROR):
        overview(read, AdapterOptions())
    assert code in [f.code for f in read.findings.of(Severity.ERROR)]
    assert words in theirs(source, config, "wan")["error"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["f2d", "qie", "qi", "wan", "ho1", "zi"])
@pytest.mark.parametrize("keys", ["", "no_resize_control = true", "control_resolution = [128, 128]",
                                  "no_resize_control = true\ncontrol_resolution = [128, 128]"])  # fmt: skip
def test_control_images_decide_batches(source, data, tmp_path, architecture, keys):
    """Lines of a list whose control images differ in number, and where they have sizes of their own in size."""
    images = [data / "images" / name for name in ("im0.png", "im1.jpg", "im2.png", "im4.png", "im5.jpg")]
    few = ARCHITECTURES[architecture].controls
    draws = random.Random(f"{architecture} {keys}")
    rows = []
    for number in range(14):
        image = tmp_path / f"{number}.png"
        Image.open(draws.choice(images)).save(image)
        controls = draws.choices(images, k=few or draws.randrange(4))
        rows.append({"image_path": str(image), "caption": "x"}
                    | {f"control_path_{i}": str(one) for i, one in enumerate(controls)})  # fmt: skip
    (tmp_path / "list.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (tmp_path / "cache").mkdir()
    config = tmp_path / "list.toml"
    text = f"{GENERAL}[[datasets]]\nimage_jsonl_file = '{tmp_path / 'list.jsonl'}'\n"
    config.write_text(f"{text}cache_directory = '{tmp_path / 'cache'}'\n{keys}", encoding="utf-8")
    seen = overview(read_config(config, ARCHITECTURES[architecture]), AdapterOptions())
    expected = theirs(source, config, architecture)
    assert "error" not in expected, expected
    expected = expected["trained"][0]
    if few is None or keys:
        assert len(seen.datasets[0].rows) > len(set(seen.datasets[0].items.buckets)) or architecture == "zi"
    mine = collections.Counter(seen.datasets[0].items.bucket_ids.tolist())
    assert sorted(mine.values()) == sorted(len(items) for _, items in expected["buckets"])
    assert sum(row.batches for row in seen.datasets[0].rows) == expected["batches"]
