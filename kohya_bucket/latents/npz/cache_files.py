"""Which cache files sd-scripts, or this package, has put beside images."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kohya_bucket.latents.architectures import Architecture
from kohya_bucket.latents.npz.names import size_from_name, usual_name

__all__ = ["CacheFile", "cache_files"]


@dataclass(frozen=True)
class CacheFile:
    """A cache file: `whole`, it is named by the image's whole file name; `further`, it is of a further size."""

    path: Path
    whole: bool
    further: bool = False


def cache_files(images: Sequence[str], arch: Architecture) -> Iterator[list[CacheFile]]:
    """The cache files of each image, by exact name: sd-scripts' own, then those of further sizes."""
    folders: dict[str, tuple[dict[str, list[str]], dict[str, list[str]]]] = {}
    for image in images:
        folder, name = os.path.split(os.path.abspath(image))
        if folder not in folders:
            folders[folder] = _listed(folder, arch)
        usual, further = folders[folder]
        stem = os.path.splitext(name)[0]
        file = next((f for f in usual.get(name, []) if size_from_name(f, name, arch)), None)
        whole = file is not None
        if file is None and arch.plain_until and os.path.exists(os.path.join(folder, stem + ".npz")):
            file = stem + ".npz"
        if file is None:
            file = next((f for f in usual.get(stem, []) if size_from_name(f, stem, arch)), None)
        if file is None:
            yield []
            continue
        more = [CacheFile(Path(folder, f), whole, further=True) for f in further.get(file, [])]
        yield [CacheFile(Path(folder, file), whole), *more]


def _listed(folder: str, arch: Architecture) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Cache files of a folder: sd-scripts' by the image's stem or name, further ones by the file they belong to."""
    usual: dict[str, list[str]] = {}
    further: dict[str, list[str]] = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(arch.suffix):
            usual.setdefault(file[: -len(arch.suffix)].rpartition("_")[0], []).append(file)
        elif (owner := usual_name(file)) is not None:
            further.setdefault(owner, []).append(file)
    return usual, further
