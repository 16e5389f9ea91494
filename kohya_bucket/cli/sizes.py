"""The sizes of the images a command is about: folders, files, lists, or a table of sizes."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.cli.tar_sources import tars_in
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.buckets.sizes import IntArray

__all__ = ["SizedImages", "images_in", "not_read", "sizes_of"]


@dataclass(frozen=True)
class SizedImages:
    """Readable sizes [N, 2]; how many files had none, and how many sd-scripts does not take for images."""

    sizes: IntArray
    unreadable: int
    source: str
    foreign: int = 0

    def __str__(self) -> str:
        broken = f" ({self.unreadable:,} unreadable left out)" if self.unreadable else ""
        foreign = f" ({self.foreign:,} left out that sd-scripts does not read)" if self.foreign else ""
        return f"{counted(len(self.sizes), 'image')} of {self.source}{broken}{foreign}"


def images_in(sources: list[str], *, recursive: bool = True, extensions: Collection[str] | None = None) -> list[str]:
    """The images that folders, files, patterns and lists name. `KohyaBucketError` where there is none.

    Args:
        extensions: endings that count in folders; by default those of images.
    """
    from kohya_bucket.images import list_images
    from kohya_bucket.images.formats import IMAGE_EXTENSIONS

    paths = list_images(sources, recursive=recursive, extensions=extensions or IMAGE_EXTENSIONS)
    if not paths:
        raise KohyaBucketError(f"{', '.join(sources)}: no images found there")
    return paths


def not_read(paths: Sequence[str]) -> dict[str, str]:
    """{path: why} of images that sd-scripts takes for none by their names, such as GIFs: it does not train them."""
    from kohya_bucket.images.formats import format_of_extension
    from kohya_bucket.sdscripts.config.files import supported_extensions

    known = supported_extensions()
    endings = {path: Path(path).suffix for path in paths}
    return {
        path: f"sd-scripts does not read {ending} files: convert it to PNG, JPEG or WebP"
        for path, ending in endings.items()
        if format_of_extension(ending) and (ending.lower() if os.name == "nt" else ending) not in known
    }


def sizes_of(
    sources: list[str], *, recursive: bool = True, workers: int | None = None, quiet: bool = False
) -> SizedImages:
    """Read headers, of tar shards too, or what is named: a table (CSV, JSON, Parquet, also one of build-cache) or an
    index of tar shards.

    Raises:
        KohyaBucketError: nothing readable there.
    """
    from kohya_bucket.images import read_sizes
    from kohya_bucket.images.size_table import TABLE_SUFFIXES, read_size_table

    source, foreign = ", ".join(sources), dict[str, str]()
    if (tars := tars_in(sources)) is not None:
        sizes = tars.sizes
    elif len(sources) == 1 and Path(sources[0]).suffix.lower() in TABLE_SUFFIXES and Path(sources[0]).is_file():
        sizes = read_size_table(sources[0]).sizes
    else:
        paths = images_in(sources, recursive=recursive)
        with scan_progress("reading headers", quiet=quiet) as progress:
            sizes = read_sizes(paths, workers=workers, progress=progress).sizes
        foreign = not_read(paths)
        sizes = sizes[[path not in foreign for path in paths]]
    readable = sizes[sizes.min(axis=1, initial=1) > 0]
    if not len(readable):
        raise KohyaBucketError(f"{source}: none of its {len(sizes)} images has a readable size")
    return SizedImages(readable, len(sizes) - len(readable), source, len(foreign))
