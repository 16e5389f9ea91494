"""A column of a Hugging Face data set as a source of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.datasets.sources.columns import cell_pixels, cell_size, explained
from kohya_bucket.datasets.sources.protocol import SourceSizes
from kohya_bucket.errors import KohyaBucketError, as_flag
from kohya_bucket.images.unreadable import UnreadableImageError

__all__ = ["HuggingFaceSource", "undecoded"]

_ROWS = 256


class HuggingFaceSource:
    """A map-style `datasets.Dataset`.

    Encoded images stay encoded until they are trained: where it can be, the image column is read with decoding
    switched off, and sizes come from headers. Images are turned upright by their EXIF, as `datasets` does itself.

    Raises:
        KohyaBucketError: a stream, or a column that does not exist.
    """

    def __init__(
        self, dataset: Any, *, image_column: str = "image", caption_column: str | None = None, obey_exif: bool = True
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise KohyaBucketError(
                f"{type(dataset).__name__} is a stream, whose length and order are unknown: "
                "use kohya_bucket.datasets.streaming.StreamingBuckets"
            )
        names = getattr(dataset, "column_names", None)
        for column in (image_column, caption_column):
            if names is not None and column is not None and column not in names:
                raise KohyaBucketError(f"column {column!r} does not exist: this dataset has {', '.join(names)}")
        self._dataset = undecoded(dataset, image_column)
        self._image, self._caption = image_column, caption_column
        self._obey_exif = as_flag("obey_exif", obey_exif)

    def __len__(self) -> int:
        return len(self._dataset)

    def read_sizes(self) -> SourceSizes:
        only = self._dataset
        if hasattr(only, "select_columns"):
            only = only.select_columns([self._image])
        sizes = np.zeros((len(only), 2), dtype=np.int32)
        failures = []
        for start in range(0, len(only), _ROWS):
            stop = min(start + _ROWS, len(only))
            # A slice of a dataset is a dict of columns; row by row only where that is not so.
            part = only[start:stop]
            cells = part[self._image] if isinstance(part, dict) else [only[i][self._image] for i in range(start, stop)]
            for i, cell in enumerate(cells, start):
                try:
                    sizes[i] = cell_size(cell, self._obey_exif)
                except UnreadableImageError as error:
                    failures.append((i, self.name(i), str(error)))
        return SourceSizes(sizes, failures)

    def pixels(self, index: int) -> npt.NDArray[np.uint8]:
        try:
            return cell_pixels(self._dataset[index][self._image], self._obey_exif)
        except UnreadableImageError as error:
            raise explained(self.name(index), error) from error

    def caption(self, index: int) -> str:
        if self._caption is None:
            return ""
        only = self._dataset
        if hasattr(only, "select_columns"):
            only = only.select_columns([self._caption])
        value = only[index][self._caption]
        return "" if value is None else str(value)

    def name(self, index: int) -> str:
        return f"hf:{index}"


def undecoded(dataset: Any, column: str) -> Any:
    """The dataset with `datasets.Image` columns left encoded; anything else as it is."""
    feature = (getattr(dataset, "features", None) or {}).get(column)
    own_transform = (getattr(dataset, "format", None) or {}).get("type") == "custom"
    if type(feature).__name__ != "Image" or own_transform or not hasattr(dataset, "cast_column"):
        return dataset
    import datasets

    # Formats such as "torch" would turn the encoded bytes into something else.
    plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    return plain.cast_column(column, datasets.Image(decode=False))
