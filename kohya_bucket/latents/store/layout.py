"""Names in a store's folder, and what is in it: shards, manifests, the root of the images."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.files import write_file
from kohya_bucket.latents.latent_space import LatentSpace
from kohya_bucket.latents.store.shard_file import TensorSpec

__all__ = ["Layout", "ShardInfo", "common_root", "given_arrays", "is_text", "relative_source"]

_VERSION = 1


@dataclass(frozen=True)
class ShardInfo:
    """A shard's file: name, length in bytes, where its tensors lie, and what they mean.

    Of outputs of text encoders, `arrays` has each array's numpy type and number of axes, as they were given.
    """

    name: str
    nbytes: int
    tensors: dict[str, TensorSpec]
    space: LatentSpace
    arrays: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Items in it, those included that newer ones have replaced."""
        return next(iter(self.tensors.values())).shape[0]

    @property
    def is_posterior(self) -> bool:
        """Its rows hold mean and standard deviation instead of latents."""
        return "posterior" in self.tensors

    def to_json(self) -> dict[str, Any]:
        places = {name: [spec.dtype, list(spec.shape), spec.offset] for name, spec in self.tensors.items()}
        more = {"arrays": {name: list(given) for name, given in self.arrays.items()}} if self.arrays else {}
        return {"name": self.name, "bytes": self.nbytes, "tensors": places, "space": asdict(self.space)} | more

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ShardInfo:
        specs = {name: TensorSpec(d, tuple(shape), at) for name, (d, shape, at) in data["tensors"].items()}
        return cls(data["name"], data["bytes"], specs, LatentSpace(**data["space"]), given_arrays(data))


def given_arrays(data: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """`ShardInfo.arrays` of a shard's or manifest's JSON; empty for latents."""
    return {name: (str(dtype), int(axes)) for name, (dtype, axes) in data.get("arrays", {}).items()}


class Layout:
    """Paths inside a store."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self.shards = self.root / "shards"
        self.work = self.root / "work"
        self.quarantine = self.root / "quarantine"
        self.store_file = self.root / "store.json"

    def create(self, images_root: Path | None = None) -> None:
        """Make the folders and `store.json`, if they are not there.

        Raises:
            LatentStoreError: the folder cannot be written.
        """
        try:
            self.shards.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LatentStoreError(f"cannot make the latent store {self.root}: {error.strerror or error}") from error
        if not self.store_file.exists():
            images = "." if images_root is None else _relative(images_root, self.root)
            text = json.dumps({"format": "kohya_bucket.latents", "version": _VERSION, "images": images}, indent=2)
            write_file(self.store_file, [text.encode("utf-8")])

    def exists(self) -> bool:
        return self.store_file.is_file() or self.shards.is_dir()

    def images_root(self) -> Path:
        """Folder that the sources' paths start from; it need not exist here."""
        try:
            data = json.loads(self.store_file.read_text(encoding="utf-8"))
            version, images = int(data["version"]), str(data["images"])
        except FileNotFoundError:
            return self.root
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LatentStoreError(
                f"{self.store_file} cannot be read ({error}): delete it, then `kohya-bucket cache repair --images DIR`"
            ) from error
        if version > _VERSION:
            raise LatentStoreError(f"{self.root} was written by a newer kohya-bucket (format {version}): upgrade")
        return Path(os.path.normpath(self.root / images))

    def new_shard(self, bucket_size: tuple[int, int], dtype: str) -> Path:
        return self.shards / f"{bucket_size[0]}x{bucket_size[1]}-{dtype}-{uuid.uuid4().hex[:16]}.safetensors"

    def shard_sizes(self) -> dict[str, int]:
        """Name -> length in bytes of every shard on disk."""
        sizes = {}
        with suppress(FileNotFoundError), os.scandir(self.shards) as found:
            for entry in found:
                if entry.name.endswith(".safetensors") and entry.name[0] != ".":
                    with suppress(FileNotFoundError):  # removed by another process since it was listed
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def manifests(self) -> list[Path]:
        """Manifests, newest first."""
        return sorted(self.root.glob("manifest-*.parquet"), reverse=True)

    def new_manifest(self, data: bytes) -> Path:
        """Name for a manifest: its time, then a hash of its content, by which damage is noticed."""
        return self.root / f"manifest-{time.time_ns():020d}-{content_tag(data)}.parquet"

    def read_manifest(self, path: Path) -> bytes:
        """Content of a manifest; `LatentStoreError` if it is not what was written under this name."""
        data = path.read_bytes()
        if path.stem.rsplit("-", 1)[-1] != content_tag(data):
            raise LatentStoreError(f"manifest {path} is damaged: its content does not match its name")
        return data


def content_tag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]


def relative_source(paths: Sequence[str | os.PathLike[str]], images_root: Path) -> list[str]:
    """Paths as they are stored: relative to `images_root` with forward slashes, absolute on another drive."""
    prefix = os.path.join(os.path.abspath(images_root), "")
    out = []
    for path in paths:
        text = os.path.abspath(path)
        inside = text.startswith(prefix)
        out.append(text[len(prefix) :].replace(os.sep, "/") if inside else _relative(Path(text), images_root))
    return out


def common_root(paths: Sequence[str], output_dir: str | os.PathLike[str] | None) -> Path:
    """Folder that sources are named from: the one the store remembers, or the deepest that holds all images."""
    if output_dir is not None and Layout(output_dir).store_file.is_file():
        return Layout(output_dir).images_root()
    if not paths:
        return Path.cwd()
    try:
        common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    except ValueError:  # several drives
        common = os.path.dirname(os.path.abspath(paths[0]))
    return Path(common)


def is_text(source: str) -> bool:
    """Whether a name is Unicode: rows hold nothing else, but names on Linux may be any bytes."""
    try:
        source.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _relative(path: Path, start: Path) -> str:
    try:
        return os.path.relpath(os.path.abspath(path), os.path.abspath(start)).replace(os.sep, "/")
    except ValueError:  # another drive
        return Path(os.path.abspath(path)).as_posix()
