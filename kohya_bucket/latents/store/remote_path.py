"""An address in object storage, used as a `Path` is: what a store does with its files, and no more."""

from __future__ import annotations

import io
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.files import write_file
from kohya_bucket.images.remote import RawFile, is_url
from kohya_bucket.latents.store import storage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import BinaryIO


_BUFFER = 1 << 16
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):[/\\]")  # one letter is a drive


class RemoteStat(NamedTuple):
    """What is known of a file there, named as `os.stat_result` does."""

    st_size: int


class RemotePath(os.PathLike[str]):
    """A file or folder at an address. There are no folders to make: they are beginnings of names.

    Methods are those of `Path`, and raise `StorageError` where the storage fails for good.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        first = "/" * rest.startswith("/")  # of file:///folder
        self.url = f"{scheme}://{first}{'/'.join(part for part in rest.split('/') if part)}"

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    def stat(self) -> RemoteStat:
        return RemoteStat(storage.length(self.url))

    def is_file(self) -> bool:
        with suppress(FileNotFoundError):
            self.stat()
            return True
        return False

    def is_dir(self) -> bool:
        return bool(storage.listing(self.url))

    def read_bytes(self) -> bytes:
        return storage.read_ranges([storage.Range(self.url, 0, storage.length(self.url))])[0]

    def mkdir(self, **_: Any) -> None:
        pass

    def unlink(self) -> None:
        storage.delete(self.url)


StorePath: TypeAlias = "Path | RemotePath"


def as_given(text: str | os.PathLike[str]) -> StorePath:
    """An address as such, anything else as a path.

    Raises:
        LatentStoreError: an address with one slash, as a `Path` of it has.
    """
    given = os.fspath(text)
    if is_url(given):
        return RemotePath(given)
    if found := _ONE_SLASH.match(given):
        raise LatentStoreError(
            f"{given}: an address begins with {found[1]}://, and a Path leaves one of the two slashes: give it as text"
        )
    return Path(text)


def place_of(root: str | os.PathLike[str]) -> StorePath:
    """An address as such, anything else as an absolute path."""
    place = as_given(root)
    return place if isinstance(place, RemotePath) else Path(os.path.abspath(place))


def sizes_in(folder: StorePath, ending: str) -> dict[str, int]:
    """Name -> length in bytes of the files in a folder that end so and are not hidden; none where it is absent."""
    if isinstance(folder, RemotePath):
        there = storage.listing(folder.url).items()
        return {name: length for name, length in there if name.endswith(ending) and name[0] != "."}
    sizes = {}
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        for entry in found:
            if entry.name.endswith(ending) and entry.name[0] != ".":
                with suppress(FileNotFoundError):  # removed by another process since it was listed
                    sizes[entry.name] = entry.stat().st_size
    return sizes


def write_new(path: StorePath, parts: Iterable[Any]) -> None:
    """Write a file under a name that nobody else uses, whole or not at all.

    Raises:
        LatentStoreError: as `write_file`.
        StorageError: it cannot be written.
        FileExistsError: in object storage, there is one.
    """
    if isinstance(path, RemotePath):
        storage.create(path.url, b"".join(parts))
    else:
        write_file(path, parts)


def open_to_read(path: StorePath) -> BinaryIO:
    """A file to read from, at any position."""
    return io.BufferedReader(RawFile(_Pieces(path.url)), _BUFFER) if isinstance(path, RemotePath) else open(path, "rb")


class _Pieces:
    """A file in object storage that is read in pieces."""

    def __init__(self, url: str) -> None:
        self._url, self.length = url, storage.length(url)

    def read_at(self, offset: int, length: int) -> bytes:
        return storage.read_ranges([storage.Range(self._url, offset, min(offset + length, self.length))])[0]
