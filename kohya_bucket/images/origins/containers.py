"""Files that hold many images each: tars, and tables with a column of images.

An image in one is named `FILE#NAME`: `shard-0000.tar#img001` is a sample of a tar, `part.parquet#17` a row of a table,
where the first one is 0. In another column than `image` it is `part.parquet#before/17`.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.files.remote import is_url
from kohya_bucket.images.files.unchanged import Stamp, read_unchanged
from kohya_bucket.images.tables.image_rows import IMAGE_COLUMN, TABLE_ENDINGS, read_row
from kohya_bucket.images.tars.tar_index import TarIndex

__all__ = ["Container", "container_of", "in_container"]

_IN_TAR = re.compile(r"(.+?\.tar)#(.+)", re.DOTALL | re.IGNORECASE)
_IN_TABLE = re.compile(
    rf"(.+?(?:{'|'.join(map(re.escape, TABLE_ENDINGS))}))#(?:(.+)/)?(\d+)", re.DOTALL | re.IGNORECASE
)  # fmt: skip


@dataclass(frozen=True)
class Container:
    """A tar, or a column of a table.

    Attributes:
        path: path or address.
        stamp: what it had when it was looked at; None: it was not, and any is taken.
        column: that holds the images; None: it is a tar.
    """

    path: str
    stamp: Stamp | None = None
    column: str | None = None

    def row_name(self, row: int) -> str:
        """The name of an image in a table."""
        return f"{self.path}#{'' if self.column == IMAGE_COLUMN else f'{self.column}/'}{row}"

    def read(self, name: str, offset: int, length: int) -> bytes:
        """The bytes of an image.

        Args:
            name: of the image.
            offset, length: of its bytes in a tar, or its row in a table; -1: as its name says.

        Raises:
            OSError: the file cannot be read.
            KohyaBucketError: it has changed since it was looked at, is damaged, or has no such image.
        """
        if self.column is not None:
            return read_row(self.path, self.stamp, self.column, int(name.rpartition("#")[2].rpartition("/")[2]))
        if offset < 0:
            key = name[len(self.path) + 1 :]
            places = _places(self.path, self.stamp)
            if key not in places:
                raise KohyaBucketError(f"{self.path}: has no image of the name {key!r}")
            offset, length = places[key]
        return read_unchanged(self.path, self.stamp, offset, length)


def in_container(name: str) -> bool:
    """Whether an image of that name is in a container, and no file of its own."""
    return container_of(name) is not None


def container_of(name: str) -> Container | None:
    """The container that an image is in by its name; None: it is a file of its own."""
    if "#" not in name or (not is_url(name) and os.path.isfile(name)):
        return None
    if found := _IN_TABLE.fullmatch(name):
        return Container(found[1], column=found[2] or IMAGE_COLUMN)
    found = _IN_TAR.fullmatch(name)
    return Container(found[1]) if found else None


@functools.lru_cache(maxsize=4)
def _places(path: str, _stamp: Stamp | None) -> dict[str, tuple[int, int]]:
    """Offset and length by name, of a tar of which only the name of an image is known."""
    index = TarIndex.build([path], caption=None)
    places = zip(index.rows["offset"].tolist(), index.rows["length"].tolist(), strict=True)
    return dict(zip(index.keys, places, strict=True))
