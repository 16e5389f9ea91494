"""Laws of the image lists, over random inputs."""

import glob
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.trainers.sdscripts.config.dreambooth import balanced, split
from kohya_bucket.trainers.sdscripts.config.keys import (
    DEFAULTS,
    KEYS,
    DatasetKind,
    Level,
    arguments,
    known_keys,
    parse_resolution,
)
from kohya_bucket.trainers.sdscripts.config.releases import NEWEST, Feature, Release
from kohya_bucket.trainers.sdscripts.dataset_images import read_folder, skipped_images, supported_extensions


def loop(repeats: list[int], wanted: int) -> list[int]:
    """The balancing as a loop, one sample at a time."""
    out, n, first = [0] * len(repeats), 0, True
    while repeats and n < wanted:
        for i, own in enumerate(repeats):
            step = own if first else 1
            out[i] += step
            n += step
            if n >= wanted:
                break
        first = False
    return out


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 120))
def test_balancing_equals_the_loop(repeats: list[int], wanted: int) -> None:
    assert balanced(repeats, wanted) == loop(repeats, wanted)


@given(st.integers(1, 60), st.floats(0, 1), st.integers(0, 2**31))
def test_both_parts_come_from_one_shuffle(count: int, share: float, seed: int) -> None:
    items = list(range(count))
    training, validation = split(items, share, seed, True), split(items, share, seed, False)
    shuffled = items[:]
    random.Random(seed).shuffle(shuffled)
    assert shuffled[: len(training)] == training
    assert shuffled[count - len(validation) :] == validation
    assert set(training) | set(validation) == set(items)
    assert len(set(training) & set(validation)) <= 1


NAMES = st.text("ab.P [1]_", min_size=1, max_size=6).filter(lambda n: n.strip() == n and n.strip("."))
EXTENSIONS = st.sampled_from([".png", ".PNG", ".Png", ".jpg", ".webp", ".txt", ".gif", ""])


@given(
    st.lists(st.tuples(NAMES, EXTENSIONS), max_size=8),
    st.sampled_from(["set", "set/", "./set", "[a]*?" if os.name != "nt" else "[a]"]),
)
def test_a_folder_is_listed_as_glob_lists_it(names: list[tuple[str, str]], folder: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        before = Path.cwd()
        os.chdir(root)
        try:
            Path(folder).mkdir()
            for name, extension in names:
                (Path(folder) / (name + extension)).touch()
            expected: set[str] = set()
            for extension in supported_extensions():
                expected.update(glob.glob(os.path.join(glob.escape(folder), "*" + extension)))
            assert read_folder(folder).images == sorted(expected)
        finally:
            os.chdir(before)


def test_every_key_has_a_level_and_a_default_of_its_type() -> None:
    for kind in DatasetKind:
        everywhere = known_keys(Level.DATASET, kind) | known_keys(Level.SUBSET, kind)
        assert {name for name, key in KEYS.items() if kind in key.kinds and key.levels} == everywhere
    for name, value in DEFAULTS.items():
        assert value is None or KEYS[name].type.fits(value), name


@pytest.mark.parametrize(
    ("version", "count"),
    [("v0.10.1", 0), ("0.10.2", 1), ("v0.10.5", 1), ("0.10.6", 2), ("0.10", 2), ("v0.11.1", 3), ("0.11.2", 4),
     ("0.12", 4), ("1.0", 4), ("main", 4)],
)  # fmt: skip
def test_a_version_has_the_changes_up_to_it(version: str, count: int) -> None:
    assert Release.from_version(version).changes == frozenset(list(Feature)[:count])


def test_a_checkout_is_judged_by_its_words(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    assert Release.in_checkout(tmp_path) == Release(frozenset())
    config_util, metadata = tmp_path / "library" / "config_util.py", tmp_path / "library" / "finetuning_dataset.py"
    config_util.write_text('"skip_image_resolution": None', encoding="utf-8")
    release = Release.in_checkout(tmp_path)
    assert release.changes == {Feature.SKIPPING}
    assert release.name == str(tmp_path)
    metadata.write_text('"width" in line_md; caption_lines', encoding="utf-8")
    assert Release.in_checkout(tmp_path).changes == frozenset(Feature) - {Feature.CONTROL_CUTS}
    control = tmp_path / "library" / "controlnet_dataset.py"
    control.write_text("cond_img, _, _ = trim_and_resize_if_required(", encoding="utf-8")
    assert Release.in_checkout(tmp_path) == NEWEST


SIZES = st.tuples(st.integers(1, 2**16), st.integers(1, 2**16))


@given(st.lists(SIZES, max_size=9), SIZES)
def test_what_has_no_more_pixels_is_skipped(sizes: list[tuple[int, int]], limit: tuple[int, int]) -> None:
    skips = skipped_images([f"{i}.png" for i in range(len(sizes))], sizes, limit)
    assert list(skips.reasons) == [i for i, (w, h) in enumerate(sizes) if w * h <= limit[0] * limit[1]]
    for i, reason in skips.reasons.items():
        assert reason.startswith(f"{sizes[i][0]}x{sizes[i][1]}: no more pixels than skip_image_resolution {limit[0]}x")
    assert not skips.unreadable


def test_resolutions_of_the_command_line() -> None:
    assert parse_resolution("512") == (512, 512)
    assert parse_resolution("512,768") == parse_resolution("512x768") == (512, 768)
    assert (
        arguments({"train_batch_size": 3, "resolution": "64", "learning_rate": 1.0, "flip_aug": None})["batch_size"]
        == 3
    )
    assert arguments({"skip_image_resolution": "512,768"})["skip_image_resolution"] == (512, 768)
    with pytest.raises(ValueError, match="skip_image_resolution is 'big'"):
        arguments({"skip_image_resolution": "big"})
    for bad in ("", "a", "1,2,3", "0", "-5"):
        with pytest.raises(ValueError):
            parse_resolution(bad)
