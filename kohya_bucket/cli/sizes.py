"""The sizes of the images a command is about: folders, files, lists, or a table of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kohya_bucket.buckets.types import IntArray
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.images import list_images, read_sizes
from kohya_bucket.images.size_table import TABLE_SUFFIXES, read_size_table

__all__ = ["SizedImages", "parse_resolution", "sizes_of"]


@dataclass(frozen=True)
class SizedImages:
    """Readable sizes [N, 2], and how many files had none."""

    sizes: IntArray
    unreadable: int
    source: str

    def __str__(self) -> str:
        broken = f" ({self.unreadable:,} unreadable left out)" if self.unreadable else ""
        return f"{len(self.sizes):,} images of {self.source}{broken}"


def sizes_of(
    sources: list[str], *, recursive: bool = True, workers: int | None = None, quiet: bool = False
) -> SizedImages:
    """Read headers, or the table if that is what is named (CSV, JSON, Parquet, also one of build-cache).

    Raises:
        KohyaBucketError: nothing readable there.
    """
    source = ", ".join(sources)
    if len(sources) == 1 and Path(sources[0]).suffix.lower() in TABLE_SUFFIXES and Path(sources[0]).is_file():
        sizes = read_size_table(sources[0]).sizes
    else:
        paths = list_images(sources, recursive=recursive)
        if not paths:
            raise KohyaBucketError(f"{source}: no images found there")
        with scan_progress("reading headers", quiet=quiet) as progress:
            sizes = read_sizes(paths, workers=workers, progress=progress).sizes
    readable = sizes[sizes.min(axis=1, initial=1) > 0]
    if not len(readable):
        raise KohyaBucketError(f"{source}: none of its {len(sizes)} images has a readable size")
    return SizedImages(readable, len(sizes) - len(readable), source)


def parse_resolution(text: str) -> tuple[int, int]:
    """`1024` or `832,1216` or `832x1216`.

    Raises:
        ConfigError: anything else.
    """
    sides = text.lower().replace("x", ",").split(",")
    if len(sides) not in (1, 2) or not all(side.strip().isdigit() for side in sides):
        raise ConfigError(f"--resolution is {text!r}, but must be one number or width,height, e.g. 1024 or 832,1216")
    return int(sides[0]), int(sides[-1])
