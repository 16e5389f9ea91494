"""Names of musubi-tuner's cache files: read as written, no two items with one."""

import os

from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.trainers.musubi.items import CacheName, foreign_names, item_stem, stems_of, without_clip

WORDS = st.text("ab_-. é1x", min_size=1, max_size=6).filter(lambda word: word.strip(". ") != "")
PATHS = st.builds(
    lambda folder, name, end: f"/data/{folder}/{name}{end}", WORDS, WORDS, st.sampled_from([".png", ".JPG"])
)


@given(st.lists(PATHS, unique=True, max_size=8))
def test_no_two_items_have_one_stem(paths: list[str]) -> None:
    stems = stems_of([(path, None, ()) for path in paths], "/data")
    assert len({stem.casefold() for stem in stems}) == len(paths)
    own = [item_stem(path).casefold() for path in paths]
    for stem, path in zip(stems, paths, strict=True):
        assert (stem == item_stem(path)) == (own.count(item_stem(path).casefold()) == 1)


@given(st.lists(PATHS, unique=True, min_size=1, max_size=8))
def test_a_further_item_renames_only_those_that_it_shares_a_stem_with(paths: list[str]) -> None:
    before = stems_of([(path, None, ()) for path in paths[:-1]], "/data")
    after = stems_of([(path, None, ()) for path in paths], "/data")
    new = item_stem(paths[-1]).casefold()
    for old, now, path in zip(before, after, paths, strict=False):
        assert old == now or item_stem(path).casefold() == new


@given(st.lists(PATHS, unique=True, max_size=6))
def test_a_data_set_that_is_moved_keeps_its_names(paths: list[str]) -> None:
    moved = [(path.replace("/data", "/else/where", 1), None, ()) for path in paths]
    assert stems_of([(path, None, ()) for path in paths], "/data") == stems_of(moved, "/else/where")


def test_two_captions_of_one_image() -> None:
    first, second = stems_of([("/data/a.png", "one", ()), ("/data/a.png", "two", ())], "/data")
    assert first != second


@given(WORDS, st.tuples(st.integers(0, 99999), st.integers(1, 999)), st.integers(1, 20000), st.integers(0, 99))
def test_names_are_read_as_they_are_written(stem: str, clip: tuple[int, int], width: int, section: int) -> None:
    end = f"_{width:04d}x0064_wan.safetensors"
    image = CacheName.from_path(os.path.join("c", stem + end), "wan", clips=False)  # noqa: PTH118
    assert image is not None
    assert (image.stem, image.size, image.clip) == (stem, (width, 64), None)
    video = CacheName.from_path(f"{stem}_{clip[0]:05d}-{clip[1]:03d}{end}", "wan", clips=True)
    assert video is not None
    assert (video.stem, video.clip, video.section) == (stem, clip, None)
    part = CacheName.from_path(f"{stem}_{clip[0]:05d}-{clip[1]:03d}-{section:04d}{end}", "wan", clips=True)
    assert part is not None
    assert (part.stem, part.clip, part.section) == (stem, clip, section)
    assert CacheName.from_path(f"{stem}{end}", "zi", clips=False) is None
    assert without_clip(f"/v/{stem}_{clip[0]:05d}-{clip[1]:03d}.mp4") == (f"/v/{stem}.mp4", clip)


def test_names_that_end_musubi_tuner_are_found(tmp_path):
    names = ["a_0064x0064_wan", "a_00000-009_0064x0064_wan", "a_00000-009-0001_0064x0064_wan", "my_wan", "a_b_64_wan"]
    for name in [*names, "a_0064x0064_zi", "my_wan_te", "notes"]:
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    images = foreign_names(str(tmp_path), "wan", clips=False)
    assert images == ["a_b_64_wan.safetensors", "my_wan.safetensors"]
    clips = foreign_names(str(tmp_path), "wan", clips=True)
    assert clips == ["a_0064x0064_wan.safetensors", *images]
    assert foreign_names(str(tmp_path / "none"), "wan", clips=True) == []
