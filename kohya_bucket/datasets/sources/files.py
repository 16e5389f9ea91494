"""Images that are files on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import as_flag
from kohya_bucket.datasets.captions import caption_beside
from kohya_bucket.datasets.sources.columns import cell_picture, explained
from kohya_bucket.datasets.sources.protocol import SourceSizes
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import ImageFormat, MetadataCache, TextColumn, read_sizes
from kohya_bucket.images.by_pillow import load_plugin
from kohya_bucket.images.formats import UnreadableImageError
from kohya_bucket.images.listing import refuse_one_path
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.pixels import Fit, Picture
from kohya_bucket.images.remote import fetched

__all__ = ["FileSource"]

_NEED_PLUGINS = (ImageFormat.AVIF, ImageFormat.HEIC, ImageFormat.JXL)


class FileSource:
    """Files, with captions from a list or from text files beside them.

    Args:
        paths: N image files.
        captions: N texts; or a file name ending such as ".txt", and then each caption is read from the file
            beside the image when the image is (".json": a text, or that under "caption"); None for no captions.
        metadata_cache: sizes of files that have not changed are taken from it.
        obey_exif: turn images upright as their EXIF asks; sd-scripts does not.
        workers, progress: see `kohya_bucket.read_sizes`.

    Raises:
        KohyaBucketError: no paths, or another number of captions.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        captions: Sequence[str] | str | None = None,
        metadata_cache: MetadataCache | None = None,
        obey_exif: bool = False,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        refuse_one_path(paths)
        if metadata_cache is not None and not isinstance(metadata_cache, MetadataCache):
            raise KohyaBucketError(f"metadata_cache is {metadata_cache!r}: give MetadataCache.load(path)")
        self.paths = paths if isinstance(paths, TextColumn) else TextColumn.of(_path_texts(paths))
        if not len(self.paths):
            raise KohyaBucketError("a dataset needs at least one image, but the list of paths is empty")
        self._ending = captions if isinstance(captions, str) else None
        self._captions = None if captions is None or isinstance(captions, str) else _texts(captions)
        if self._captions is not None and len(self._captions) != len(self.paths):
            raise KohyaBucketError(
                f"{len(self._captions)} captions for {len(self.paths)} images: give one per image, in the same order"
            )
        if self._ending is not None and not self._ending.startswith("."):
            raise KohyaBucketError(
                f"captions={self._ending!r} is one text: give a list, or a file name ending such as '.txt'"
            )
        self._obey_exif = as_flag("obey_exif", obey_exif)
        scan = read_sizes(self.paths, cached=metadata_cache, workers=workers, progress=progress)
        self._plugins = [kind for kind in _NEED_PLUGINS if (scan.formats == kind).any()]
        self._sizes = SourceSizes(scan.upright_sizes() if self._obey_exif else scan.sizes, scan.failures)

    def __len__(self) -> int:
        return len(self.paths)

    def read_sizes(self) -> SourceSizes:
        return self._sizes

    def pixels(self, index: int) -> npt.NDArray[np.uint8]:
        return self.picture(index).pixels

    def picture(self, index: int, fit: Fit | None = None) -> Picture:
        for kind in self._plugins:
            load_plugin(kind)
        path = self.paths[index]
        try:
            return cell_picture(fetched(path), self._obey_exif, fit)
        except (OSError, UnreadableImageError) as error:
            raise explained(path, error) from error

    def caption(self, index: int) -> str:
        if self._captions is not None:
            return self._captions[index]
        if self._ending is None:
            return ""
        return caption_beside(self.paths[index], self._ending) or ""

    def name(self, index: int) -> str:
        return self.paths[index]

    def __getstate__(self) -> dict[str, Any]:
        # Workers decode; sizes stay with the process that placed the images.
        return {**self.__dict__, "_sizes": None}


def _path_texts(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    listed = list(paths)
    for i, path in enumerate(listed):
        if not isinstance(path, (str, os.PathLike)):
            raise KohyaBucketError(f"path {i} is {path!r}, but must be a text or a Path: leave out rows without a file")
    return [os.fspath(path) for path in listed]


def _texts(captions: Sequence[str]) -> TextColumn:
    if isinstance(captions, Mapping):
        raise KohyaBucketError(
            "captions is a mapping, and iterating over it gives its keys: give a list in the order of the paths, e.g. "
            "[captions[path] for path in paths]"
        )
    listed = list(captions)
    for i, caption in enumerate(listed):
        if not isinstance(caption, str):
            raise KohyaBucketError(f'caption {i} is {caption!r}, but must be a text; "" stands for none')
    return TextColumn.of(listed)
