"""What a caching loop of musubi-tuner is handed: what is wanted, and a stand-in for what cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_folder import Selector
from PIL import Image

from kohya_bucket.musubi.caching.session import PickedSource
from kohya_bucket.musubi.caching.sources import Source


class Picker:
    def __init__(self, wanted: set[int]) -> None:
        self.wanted, self.out, self.selector = wanted, dict[int, str](), Selector(64)

    def wants(self, number: int) -> bool:
        return number in self.wanted

    def before(self, number: int, *, pictures: bool) -> None:
        assert number in self.wanted

    def failed(self, number: int, why: str) -> None:
        self.out[number] = why

    def source(self, number: int) -> Source:
        return Source(number, f"/im/{number}.png", None, str(number), (f"/im/{number}.png",))


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
        return f"/im/{number}.png", [Image.new("RGB", (70, 60))], "caption", None


def test_only_what_is_wanted_is_fetched_and_what_fails_is_known() -> None:
    inner = Images(6, {1: OSError("image file is truncated"), 3: SyntaxError("broken PNG file"), 5: OSError("never")})
    picker = Picker({0, 1, 3, 4})
    found = [fetch() for fetch in PickedSource(inner, picker)]
    assert inner.fetched == [0, 1, 3, 4]
    assert picker.out == {1: "cannot be read as an image (image file is truncated)", 3: "SyntaxError: broken PNG file"}
    assert [key for key, *_ in found] == [f"/im/{number}.png" for number in (0, 1, 3, 4)]
    assert all(len(images) == 1 and min(images[0].size) >= 32 for _, images, _, _ in found)


def test_memory_that_runs_out_is_no_broken_image() -> None:
    (fetch,) = PickedSource(Images(1, {0: MemoryError()}), Picker({0}))
    with pytest.raises(MemoryError):
        fetch()


def test_an_image_without_a_bucket_is_left_out() -> None:
    picker = Picker({0})
    picker.selector = SimpleNamespace(get_bucket_resolution=lambda size: (size[0], size[1] // 64))  # type: ignore[assignment]
    for fetch in PickedSource(Images(1, {}), picker):
        fetch()
    assert picker.out == {0: "70x60 is too small: with bucket_no_upscale it gets no bucket"}


def test_captions_and_videos_have_stand_ins_of_their_own() -> None:
    def broken() -> Any:
        raise OSError("no caption")

    captions = PickedSource(_Listed([broken], caption_only=True), Picker({0}))
    assert [fetch() for fetch in captions] == [("/im/0.png", "")]
    (video,) = [fetch() for fetch in PickedSource(_Listed([broken], caption_only=False), Picker({0}))]
    assert np.asarray(video[1]).shape == (1, 64, 64, 3)


class _Listed(list[Any]):
    def __init__(self, fetches: list[Any], *, caption_only: bool) -> None:
        super().__init__(fetches)
        self.caption_only = caption_only
