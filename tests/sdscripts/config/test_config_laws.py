"""Laws of the image lists, over random inputs."""

from __future__ import annotations

import glob
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kohya_bucket.sdscripts.config.arguments import DEFAULTS, arguments, parse_resolution
from kohya_bucket.sdscripts.config.folders import read_folder, supported_extensions
from kohya_bucket.sdscripts.config.regularization import balanced
from kohya_bucket.sdscripts.config.schema import KEYS, Kind, Level, Release, known_keys
from kohya_bucket.sdscripts.config.splitting import split


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


@settings(max_examples=40, deadline=None)
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
    for kind in Kind:
        everywhere = known_keys(Level.DATASET, kind) | known_keys(Level.SUBSET, kind)
        assert {
            k.name for k in KEYS.values() if kind in k.kinds and (k.kinds != frozenset(Kind) or k.name != "image_dir")
        } <= everywhere
    for name, value in DEFAULTS.items():
        if value is not None and name in KEYS:
            assert KEYS[name].type.accepts(value), name


@pytest.mark.parametrize(
    ("version", "release"),
    [("v0.9.1", Release.V0_9), ("0.8.7", Release.V0_9), ("v0.10.1", Release.V0_10), ("main", Release.V0_10)],
)
def test_releases(version: str, release: Release) -> None:
    assert Release.of(version) is release


def test_resolutions_of_the_command_line() -> None:
    assert parse_resolution("512") == (512, 512)
    assert parse_resolution("512,768") == parse_resolution("512x768") == (512, 768)
    assert (
        arguments({"train_batch_size": 3, "resolution": "64", "learning_rate": 1.0, "flip_aug": None})["batch_size"]
        == 3
    )
    for bad in ("", "a", "1,2,3", "0", "-5"):
        with pytest.raises(ValueError):
            parse_resolution(bad)
