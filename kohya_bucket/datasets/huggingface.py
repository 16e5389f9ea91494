"""A column of a Hugging Face dataset as a source of images."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kohya_bucket.checks import as_flag
from kohya_bucket.datasets.captions import caption_of_cell, is_blank, warn_uncaptioned
from kohya_bucket.datasets.sources import CellSource, SourceSizes, cell_size, column_of, content_of
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import TextColumn
from kohya_bucket.images.formats import UnreadableImageError

_ROWS = 256


class HuggingFaceSource(CellSource):
    """A map-style `datasets.Dataset`.

    Encoded images stay encoded until they are trained: where it can be, the image column is read with decoding
    switched off, and sizes come from headers. Images are turned upright by their EXIF, as `datasets` does itself.

    Raises:
        KohyaBucketError: a stream, several splits at once, no rows, or a column that does not exist.
    """

    def __init__(
        self, dataset: Any, *, image_column: str = "image", caption_column: str | None = None, obey_exif: bool = True
    ) -> None:
        refuse_splits(dataset)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise KohyaBucketError(
                f"{type(dataset).__name__} is a stream, and its length and order are unknown: "
                "use kohya_bucket.datasets.streaming.StreamingBuckets"
            )
        names = getattr(dataset, "column_names", None)
        for column in (image_column, caption_column):
            if names is not None and column is not None and column not in names:
                raise KohyaBucketError(f"column {column!r} does not exist: this dataset has {', '.join(names)}")
        if not len(dataset):
            raise KohyaBucketError("the dataset has no rows: check its split and filters")
        self._dataset = undecoded(dataset, image_column)
        # A transform of the dataset's own may need any column.
        self._whole_rows = _has_own_transform(dataset) or not hasattr(dataset, "select_columns")
        self._image, self._caption = image_column, caption_column
        # Chosen once, which takes half a millisecond.
        self._captions: Any = None if caption_column is None else self._only(caption_column)
        self._obey_exif = as_flag("obey_exif", obey_exif)

    @property
    def image_names(self) -> Sequence[str]:
        """[N] of each image its path, or a checksum of what its cell holds, as it was when sizes were read.

        A transform of the dataset's own may change both each time, so there they are the numbers of the rows.
        """
        return self._names

    def __len__(self) -> int:
        return len(self._dataset)

    def read_sizes(self) -> SourceSizes:
        columns = [self._image] if self._caption is None else [self._image, self._caption]
        only, bare = self._only(*columns), list[str]()
        sizes = np.zeros((len(only), 2), dtype=np.int32)
        failures, names = [], []
        changes = _has_own_transform(self._dataset)
        for start in range(0, len(only), _ROWS):
            stop = min(start + _ROWS, len(only))
            part = only[start:stop]
            if isinstance(part, Mapping):  # of columns, as a slice of a dataset is
                of_part = [column_of(part, column, f"{self.name(start)} to {stop - 1}") for column in columns]
            else:
                rows = [(self.name(i), only[i]) for i in range(start, stop)]
                of_part = [[column_of(row, column, name) for name, row in rows] for column in columns]
            cells, *texts = of_part
            bare += [self.name(i) for column in texts for i, text in enumerate(column, start) if is_blank(text)]
            for i, cell in enumerate(cells, start):
                names.append(self.name(i) if changes else _told_apart(cell))
                try:
                    sizes[i] = cell_size(cell, self._obey_exif)
                except UnreadableImageError as error:
                    failures.append((i, self.name(i), str(error)))
        self._names = TextColumn.from_texts(names)
        warn_uncaptioned(bare, len(only))
        return SourceSizes(sizes, failures)

    def cell(self, index: int) -> Any:
        return column_of(self._dataset[index], self._image, self.name(index))

    def caption(self, index: int) -> str:
        if self._caption is None:
            return ""
        name = self.name(index)
        return caption_of_cell(column_of(self._captions[index], self._caption, name), name)

    def name(self, index: int) -> str:
        return f"hf:{index}"

    def _only(self, *columns: str) -> Any:
        return self._dataset if self._whole_rows else self._dataset.select_columns(list(columns))


def _told_apart(cell: Any) -> str:
    content = content_of(cell)
    return content if isinstance(content, str) else f"{zlib.crc32(content):08x}"


def refuse_splits(dataset: Any) -> None:
    """Raises `KohyaBucketError` for a mapping of datasets, which `load_dataset` returns without `split=`."""
    if isinstance(dataset, Mapping):
        names = ", ".join(repr(name) for name in dataset)
        raise KohyaBucketError(
            f"this is a {type(dataset).__name__} of {names}, not one dataset: choose one by its name"
        )


def undecoded(dataset: Any, column: str) -> Any:
    """The dataset with `datasets.Image` columns left encoded; anything else as it is."""
    feature = (getattr(dataset, "features", None) or {}).get(column)
    if type(feature).__name__ != "Image" or _has_own_transform(dataset) or not hasattr(dataset, "cast_column"):
        return dataset
    import datasets

    # Formats such as "torch" would turn the encoded bytes into something else.
    plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    return plain.cast_column(column, datasets.Image(decode=False))


def _has_own_transform(dataset: Any) -> bool:
    return (getattr(dataset, "format", None) or {}).get("type") == "custom"
