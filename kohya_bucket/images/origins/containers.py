"""Files that hold many images each: tars, and tables with a column of images.

An image in one is named `FILE#NAME`: `shard-0000.tar#img001` is a sample of a tar, `part.parquet#17` a row of a table,
where the first one is 0. In another column than `image` it is `part.parquet#before/17`.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, replace

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.files.remote import is_url
from kohya_bucket.images.files.unchanged import Stamp, check_unchanged, read_unchanged, stamp_of
from kohya_bucket.images.tables.image_rows import IMAGE_COLUMN, TABLE_ENDINGS, places_of_rows, read_by_groups, read_row
from kohya_bucket.images.tars.tar_index import TarIndex
from kohya_bucket.images.unreadable import explain_os_error

__all__ = ["Container", "apart", "container_of", "in_container"]

_IN_TAR = re.compile(r"(.+?\.tar)#(.+)", re.DOTALL | re.IGNORECASE)
_IN_TABLE = re.compile(
    rf"(.+?(?:{'|'.join(map(re.escape, TABLE_ENDINGS))}))#(?:(.+)/)?(\d+)", re.DOTALL | re.IGNORECASE
)  # fmt: skip


@dataclass(frozen=True)
class Container:
    """A tar, or a column of a table.

    Attributes:
        path: path or address.
        stamp: what it had when it was looked at; None: it was not, and it may be any.
        column: that holds the images; None: it is a tar.
    """

    path: str
    stamp: Stamp | None = None
    column: str | None = None

    def row_name(self, row: int) -> str:
        """The name of an image in a table."""
        return f"{self.path}#{'' if self.column == IMAGE_COLUMN else f'{self.column}/'}{row}"

    def checked(self) -> Container:
        """The same with the stamp that it has now, which must be the one before; of a time of 0, only the length.

        Raises:
            KohyaBucketError: it has changed, or is gone.
        """
        try:
            found = stamp_of(self.path)
        except OSError as error:
            raise KohyaBucketError(f"{self.path}: cannot be read ({explain_os_error(error)})") from None
        if self.stamp is not None:
            check_unchanged(self.path, found, self.stamp if self.stamp[1] else (self.stamp[0], found[1]))
        return replace(self, stamp=found)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """The bytes of an image.

        Args:
            name: of the image.
            offset, length: of its bytes in a tar or an Arrow file; -1: as its name says.

        Raises:
            OSError: the file cannot be read.
            KohyaBucketError: it has changed since it was looked at, is damaged, or has no such image.
        """
        stamp = self.stamp or stamp_of(self.path)
        key = name[len(self.path) + 1 :]
        if self.column is not None:
            key = key.rpartition("/")[2]
            if read_by_groups(self.path):
                return read_row(self.path, stamp, self.column, int(key))
        if offset < 0:
            places = _places(self, stamp)
            if key not in places:
                raise KohyaBucketError(f"{self.path}: has no image of the name {key!r}")
            offset, length = places[key]
        return read_unchanged(self.path, stamp, offset, length)


def apart(name: str) -> tuple[str, str]:
    """The path of a container and the rest of an image's name, from "#" on; of any other image its path and ""."""
    found = (_IN_TABLE.fullmatch(name) or _IN_TAR.fullmatch(name)) if "#" in name else None
    return (found[1], name[found.end(1) :]) if found else (name, "")


def in_container(name: str) -> bool:
    """Whether an image of that name is in a container, and no file of its own."""
    return container_of(name) is not None


def container_of(name: str) -> Container | None:
    """The container that an image is in by its name; None: it is a file of its own."""
    path, inside = apart(name)
    if not inside or (not is_url(name) and os.path.isfile(name)):
        return None
    if path.lower().endswith(".tar"):
        return Container(path)
    return Container(path, column=inside[1:].rpartition("/")[0] or IMAGE_COLUMN)


@functools.lru_cache(maxsize=4)
def _places(container: Container, stamp: Stamp) -> dict[str, tuple[int, int]]:
    """Offset and length by name, where only the name of an image is known."""
    path = container.path
    if container.column is not None:
        return places_of_rows(path, stamp, container.column)
    index = TarIndex.build([path], caption=None)
    check_unchanged(path, index.stamps[0], stamp)
    check_unchanged(path, stamp_of(path), stamp)
    places = zip(index.rows["offset"].tolist(), index.rows["length"].tolist(), strict=True)
    return dict(zip(index.keys, places, strict=True))
