"""What a caching loop of musubi-tuner is handed: what is wanted, and a stand-in for what cannot be read."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_folder import Folder
from PIL import Image

from kohya_bucket.trainers.musubi.caching import PickedSource, Session


def session_of(root: Path) -> Session:
    return Session(Folder(root, 1).caches(), text=False)


class Images:
    """Fetches of images, of which those in `broken` raise."""

    caption_only, multiple_target = False, True

    def __init__(self, count: int, broken: dict[int, BaseException]) -> None:
        self.count, self.broken, self.fetched = count, broken, list[int]()

    def __iter__(self) -> Iterator[Callable[[], Any]]:
        return iter([lambda number=number: self.get_image_data(number) for number in range(self.count)])

    def get_image_data(self, number: int) -> Any:
        self.fetched.append(number)
        if number in self.broken:
            raise self.broken[number]
        return f"{number}.png", [Image.new("RGB", (70, 60))], "caption", None


def test_only_what_is_wanted_is_fetched_and_what_fails_is_known(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 5)
    folder.make()
    for number in (0, 1, 3, 4):
        (tmp_path / "cache" / f"a{number}_0064x0064_zi.safetensors").unlink()
    session = Session(folder.caches(), text=False)
    inner = Images(5, {1: OSError("image file is truncated"), 2: OSError("never"), 3: SyntaxError("broken PNG file")})
    found = [fetch() for fetch in PickedSource(inner, session)]
    assert inner.fetched == [0, 1, 3, 4]
    assert session.left_out == {
        1: "cannot be read as an image (image file is truncated)",
        3: "SyntaxError: broken PNG file",
    }
    assert [key for key, *_ in found] == [folder.paths[number] for number in (0, 1, 3, 4)]
    assert all(len(images) == 1 and min(images[0].size) >= 32 for _, images, _, _ in found)


def test_the_folder_is_looked_through_once_while_caches_are_written_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looks, scandir = Folder(tmp_path, 5), list[str](), os.scandir
    folder.make()
    session = Session(folder.caches(), text=False)

    def look(path: str) -> Any:
        looks.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", look)
    for number in range(5):
        assert not session.wants(number)
        (tmp_path / "im" / f"{number}.safetensors").touch()
        os.utime(tmp_path / "im", ns=(number, number))
    assert len(looks) == 1


def test_memory_that_runs_out_is_no_broken_image(tmp_path: Path) -> None:
    (fetch,) = PickedSource(Images(1, {0: MemoryError()}), session_of(tmp_path))
    with pytest.raises(MemoryError):
        fetch()


def test_an_image_without_a_bucket_is_left_out(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.caches.selector = SimpleNamespace(get_bucket_resolution=lambda size: (size[0], size[1] // 64))  # type: ignore[assignment]
    for fetch in PickedSource(Images(1, {}), session):
        fetch()
    assert session.left_out == {0: "70x60 is too small: with bucket_no_upscale it gets no bucket"}


def test_captions_and_videos_have_stand_ins_of_their_own(tmp_path: Path) -> None:
    def broken() -> Any:
        raise OSError("no caption")

    session = session_of(tmp_path)
    captions = PickedSource(_Listed([broken], caption_only=True), session)
    assert [fetch() for fetch in captions] == [(session.caches.table.sources[0].key, "")]
    (video,) = [fetch() for fetch in PickedSource(_Listed([broken], caption_only=False), session)]
    assert np.asarray(video[1]).shape == (1, 64, 64, 3)


class _Listed(list[Any]):
    def __init__(self, fetches: list[Any], *, caption_only: bool) -> None:
        super().__init__(fetches)
        self.caption_only = caption_only
