"""The names of a store's files: shards, manifests, and `store.json` with the root of the images."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kohya_bucket.errors import LatentStoreError, as_damage, reading
from kohya_bucket.extras import argument
from kohya_bucket.images.arrow_files import parquet_bytes
from kohya_bucket.images.origins import apart
from kohya_bucket.images.remote import is_url
from kohya_bucket.latents.store.storage import (
    RemotePath,
    StorePath,
    check_exclusive,
    is_there,
    open_to_read,
    place_of,
    second_look,
    sizes_in,
    write_new,
)
from kohya_bucket.texts import is_whole

SHARD_NAME = re.compile(r"\d+x\d+-\w+-[0-9a-f]{16}\.safetensors")
_MANIFEST = re.compile(r"manifest-[0-9]{1,20}-[0-9a-f]+\.parquet")
_VERSION = 1
_MARK = b"kohya_bucket.latents"
_MOST_TEXT = 1 << 16
_MOST_MANIFEST = 1 << 36  # 100 million items with long captions have 10 GB


def remedy(root: object) -> str:
    """What to do about damage in a store, as a command to paste."""
    return f"run `kohya-bucket cache prune {argument(root)} --damaged`, and encode again what is missing then"


class Layout:
    """Paths inside a store."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root: StorePath = place_of(root)
        self.shards = self.root / "shards"
        self.store_file = self.root / "store.json"

    def create(self, images_root: Path | None = None) -> None:
        """Make missing folders and a missing `store.json`. Raises `LatentStoreError` if they cannot be written."""
        try:
            if not is_there(self.shards):
                self.shards.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LatentStoreError(f"cannot make the latent store {self.root}: {error.strerror or error}") from error
        if isinstance(self.root, RemotePath):
            check_exclusive(self.root.url)
        if not is_there(self.store_file):
            images = "." if images_root is None else _relative(images_root, self.root)
            text = json.dumps({"format": _MARK.decode(), "version": _VERSION, "images": images}, indent=2)
            with suppress(FileExistsError):  # in object storage: another process is making the same store
                write_new(self.store_file, [text.encode("utf-8")])

    def exists(self) -> bool:
        return is_there(self.store_file) or is_there(self.shards)

    def images_root(self) -> Path:
        """Folder that the sources' paths start from; it need not exist here."""
        try:
            version, images = second_look(self.store_file, self._stated)
        except FileNotFoundError:
            return Path(os.fspath(self.root))
        if version > _VERSION:
            raise LatentStoreError(f"{self.root} was written by a newer kohya-bucket (format {version}): upgrade")
        if isinstance(self.root, RemotePath):  # a folder on the machine that wrote there, or nowhere
            return Path(images) if os.path.isabs(images) else Path(self.root.url, images)
        return Path(os.path.normpath(self.root / images))

    def _stated(self) -> tuple[int, str]:
        remedy = f"run `kohya-bucket cache prune {argument(self.root)} --damaged --image-dir DIR`"
        with as_damage(f"{self.store_file} cannot be read", remedy):
            data = json.loads(self.check_own().decode("utf-8"))
            version, images = data["version"], data["images"]
            if type(version) is not int or not is_text(images):
                raise ValueError(f"version {version!r}, images {images!r}"[:200])
            return version, images

    def check_own(self) -> bytes:
        """The content of `store.json`; `LatentStoreError` if that file is not ours."""
        with reading(self.store_file), open_to_read(self.store_file) as file:
            data = file.read(_MOST_TEXT)
        if _MARK not in data:
            raise LatentStoreError(
                f"{self.store_file} is not made by kohya-bucket: give a folder of the store's own, or, if there is a "
                "store beside it, move that file away"
            )
        return data

    def own_file(self, name: str) -> StorePath | None:
        """The path of a shard or a manifest; None if we never give one such a name."""
        if SHARD_NAME.fullmatch(name):
            return self.shards / name
        return self.root / name if _MANIFEST.fullmatch(name) else None

    def new_shard(self, bucket_size: tuple[int, int], dtype: str, tag: str = "") -> StorePath:
        """Path for a shard whose name ends with `tag`; "" makes a unique one."""
        tag = tag or uuid.uuid4().hex[:16]
        return self.shards / f"{bucket_size[0]}x{bucket_size[1]}-{dtype}-{tag}.safetensors"

    def shard_sizes(self) -> dict[str, int]:
        """Name -> length in bytes of every shard; files with other names are not ours."""
        return {name: n for name, n in sizes_in(self.shards, ".safetensors").items() if SHARD_NAME.fullmatch(name)}

    def manifests(self) -> list[StorePath]:
        """Manifests, newest first, that is by descending number, see `new_manifest`."""
        paths = [self.root / name for name in sizes_in(self.root, ".parquet") if _MANIFEST.fullmatch(name)]
        return sorted(paths, key=lambda path: (_number(path), path.name), reverse=True)

    def new_manifest(self, data: bytes) -> StorePath:
        """Path for a manifest: one more than the greatest number there, and a hash of its content, which shows damage.

        Not the time: a clock that runs ahead would make an old manifest the newest.
        """
        number = 1 + max((_number(path) for path in self.manifests()), default=0)
        return self.root / f"manifest-{number:020d}-{content_tag(data)}.parquet"

    def read_manifest(self, path: StorePath) -> bytes:
        """Content of a manifest; `LatentStoreError` if it does not match its name."""
        with as_damage(f"manifest {path} is damaged"), reading(path):
            if path.stat().st_size > _MOST_MANIFEST:
                raise LatentStoreError(f"manifest {path} is damaged: it is too long to be one")
            data = path.read_bytes() if isinstance(path, RemotePath) else parquet_bytes(path, _MOST_MANIFEST)
        if content_of(path) != content_tag(data):
            raise LatentStoreError(f"manifest {path} is damaged: its content does not match its name")
        return data


def _number(manifest: StorePath) -> int:
    return int(manifest.name.split("-")[1])


def content_of(manifest: StorePath) -> str:
    """The content tag in a manifest's name."""
    return manifest.name.rpartition("-")[2].removesuffix(".parquet")


def content_tag(data: bytes) -> str:
    """Hash of the bytes, 16 hexadecimal digits."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]


def relative_source(paths: Sequence[str | os.PathLike[str]], images_root: Path) -> list[str]:
    """Paths as stored: relative to `images_root` with forward slashes, else absolute; URLs unchanged."""
    prefix = os.path.join(os.path.abspath(images_root), "")
    out = []
    for path in paths:
        text, inside = apart(absolute(path))
        if text.startswith(prefix):
            text = text[len(prefix) :].replace(os.sep, "/")
        elif not is_url(text):
            text = _relative(Path(text), images_root)
        out.append(text + inside)
    return out


def absolute(path: str | os.PathLike[str]) -> str:
    """An image's name with the absolute path of its file; a URL unchanged."""
    text, inside = apart(os.fspath(path))
    return (text if is_url(text) else os.path.abspath(text)) + inside


def paths_of(sources: Sequence[str], images_root: Path) -> list[str]:
    """The inverse of `relative_source`."""
    root = os.fspath(images_root)
    named = ((source, *apart(source)) for source in sources)
    return [
        source if is_url(source) else os.path.normpath(os.path.join(root, file)) + inside
        for source, file, inside in named
    ]


def common_root(paths: Sequence[str], output_dir: str | os.PathLike[str] | None) -> Path:
    """The folder that source names start from: the one in `store.json`, or the deepest one that holds all images."""
    if output_dir is not None and is_there((layout := Layout(output_dir)).store_file):
        return layout.images_root()
    paths = [path for path in paths if not is_url(path)]
    if not paths:
        return Path.cwd()
    try:
        common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    except ValueError:  # several drives
        common = os.path.dirname(os.path.abspath(paths[0]))
    return Path(common)


def is_text(name: Any) -> bool:
    """Whether a name is a text of Unicode without zeros, as rows require; on Linux that of a file may be any bytes."""
    return isinstance(name, str) and "\0" not in name and is_whole(name)


def _relative(path: Path, start: StorePath) -> str:
    full = os.path.abspath(path)
    with suppress(ValueError):  # another drive
        if not isinstance(start, RemotePath):
            return os.path.relpath(full, os.path.abspath(start)).replace(os.sep, "/")
    return Path(full).as_posix()
