"""The sizes of the images a command is about: folders, files, lists, or a table of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.errors import KohyaBucketError

if TYPE_CHECKING:
    from kohya_bucket.buckets.sizes import IntArray

__all__ = ["SizedImages", "images_in", "sizes_of"]


@dataclass(frozen=True)
class SizedImages:
    """Readable sizes [N, 2], and how many files had none."""

    sizes: IntArray
    unreadable: int
    source: str

    def __str__(self) -> str:
        broken = f" ({self.unreadable:,} unreadable left out)" if self.unreadable else ""
        return f"{len(self.sizes):,} images of {self.source}{broken}"


def images_in(sources: list[str], *, recursive: bool = True) -> list[str]:
    """The images that folders, files, patterns and lists name. `KohyaBucketError` where there is none."""
    from kohya_bucket.images import list_images

    paths = list_images(sources, recursive=recursive)
    if not paths:
        raise KohyaBucketError(f"{', '.join(sources)}: no images found there")
    return paths


def sizes_of(
    sources: list[str], *, recursive: bool = True, workers: int | None = None, quiet: bool = False
) -> SizedImages:
    """Read headers, or the table if that is what is named (CSV, JSON, Parquet, also one of build-cache).

    Raises:
        KohyaBucketError: nothing readable there.
    """
    from kohya_bucket.images import read_sizes
    from kohya_bucket.images.tables.size_table import TABLE_SUFFIXES, read_size_table

    source = ", ".join(sources)
    if len(sources) == 1 and Path(sources[0]).suffix.lower() in TABLE_SUFFIXES and Path(sources[0]).is_file():
        sizes = read_size_table(sources[0]).sizes
    else:
        paths = images_in(sources, recursive=recursive)
        with scan_progress("reading headers", quiet=quiet) as progress:
            sizes = read_sizes(paths, workers=workers, progress=progress).sizes
    readable = sizes[sizes.min(axis=1, initial=1) > 0]
    if not len(readable):
        raise KohyaBucketError(f"{source}: none of its {len(sizes)} images has a readable size")
    return SizedImages(readable, len(sizes) - len(readable), source)
