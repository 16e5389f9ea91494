"""A data set's images and videos as its caching loop takes them: what cannot be read is named, and not handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.formats import not_loaded
from kohya_bucket.musubi.caching.sources import Source
from kohya_bucket.musubi.objects import Selector
from kohya_bucket.texts import counted

__all__ = ["PickedSource", "Picker", "why_unreadable"]

Fetch = Callable[[], Any]
_SIDE = 64  # pixels of a picture that stands in for one that cannot be read; it goes into no cache


class Picker(Protocol):
    """Chooses which items are fetched, and takes note of what became of them. Called on several threads."""

    @property
    def selector(self) -> Selector: ...

    def wants(self, number: int) -> bool: ...

    def before(self, number: int, *, pictures: bool) -> None: ...

    def failed(self, number: int, why: str) -> None: ...

    def source(self, number: int) -> Source: ...


class PickedSource:
    """Stands in for a data source while its items are cached.

    A fetch that fails gives a picture of no meaning, because the loop that asks for it cannot go on without one: the
    picker knows of it, and takes the item out of the batch that it comes in.
    """

    def __init__(self, inner: Any, picker: Picker) -> None:
        self._inner = inner
        self._picker = picker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Fetch]:
        for number, fetch in enumerate(self._inner):
            if self._picker.wants(number):
                taken = partial(self._fetch, number, fetch)
                vars(taken).update(getattr(fetch, "__dict__", {}))  # which line of a list it is
                yield taken

    def _fetch(self, number: int, fetch: Fetch) -> Any:
        pictures = not self._inner.caption_only
        try:
            self._picker.before(number, pictures=pictures)
            found = fetch()
            if pictures:
                _load(found, self._picker.selector)
        except MemoryError:
            raise
        except Exception as error:  # whatever a decoder raises at a file
            self._picker.failed(number, _said(error))
            return self._stand_in(number, pictures=pictures)
        return found

    def _stand_in(self, number: int, *, pictures: bool) -> Any:
        source = self._picker.source(number)
        caption = source.caption or ""
        if not pictures:
            return source.key, caption
        if not hasattr(self._inner, "get_image_data"):
            import numpy as np

            return source.key, [np.zeros((_SIDE, _SIDE, 3), np.uint8)], caption, None
        from PIL import Image

        picture = Image.new("RGB", (_SIDE, _SIDE))
        several = hasattr(self._inner, "multiple_target")
        return source.key, [picture] if several else picture, caption, None


def why_unreadable(dataset: Any, number: int, selector: Selector) -> str:
    """Why an item cannot be cached; an empty text where it can be."""
    datasource = dataset.datasource
    try:
        if hasattr(datasource, "get_image_data"):
            _load(datasource.get_image_data(number), selector)
            return ""
        fps = (None, None) if dataset.source_fps is None else (dataset.source_fps, dataset.target_fps)
        datasource.set_bucket_selector(selector)
        datasource.set_source_and_target_fps(*fps)
        found = datasource.get_video_data(number)
        _load(found, selector)
        frames = len(found[1])
        least = 1 if dataset.frame_extraction == "full" else min(dataset.target_frames)
        if frames < least:
            return f"{counted(frames, 'frame')}, and none of target_frames is that short"
    except MemoryError:
        raise
    except Exception as error:
        return _said(error)
    return ""


def _load(found: Any, selector: Selector) -> None:
    """Decode what is decoded only when it is used, and see that there is a bucket for it."""
    images, controls = found[1], found[3] if len(found) > 3 else None
    images = images if isinstance(images, list) else [images]
    for picture in (*images, *(controls or ())):
        if hasattr(picture, "load"):
            picture.load()
    if not images:
        raise KohyaBucketError("it has no frames")
    if 0 in getattr(images[0], "shape", ())[:2]:
        raise KohyaBucketError("it is too small: with bucket_no_upscale it gets no bucket")
    if hasattr(images[0], "size") and isinstance(images[0].size, tuple):
        width, height = images[0].size
        bucket = selector.get_bucket_resolution((width, height))
        if min(bucket) < 1:
            raise KohyaBucketError(f"{width}x{height} is too small: with bucket_no_upscale it gets no bucket")


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, KohyaBucketError) else not_loaded(error)
