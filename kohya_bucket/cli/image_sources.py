"""What the sources of a command line are: files of one image each, tar shards, or tables with a column of images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.cli.source_options import SourceOptions
from kohya_bucket.cli.table_sources import tables_in
from kohya_bucket.cli.tar_sources import shards_in
from kohya_bucket.datasets.captions import caption_beside, caption_of_cell, caption_of_file
from kohya_bucket.errors import ConfigError
from kohya_bucket.images import list_images, read_sizes
from kohya_bucket.images.image_rows import TABLE_ENDINGS, scan_rows
from kohya_bucket.images.listing import absolute_paths
from kohya_bucket.images.origins import Container, Origins
from kohya_bucket.images.parallel import REQUESTS, for_each
from kohya_bucket.images.stamps import read_unchanged
from kohya_bucket.images.tar_index import TarIndex
from kohya_bucket.texts import counted, read_text

if TYPE_CHECKING:
    from kohya_bucket.buckets.sizes import IntArray
    from kohya_bucket.images.parallel import Engine

__all__ = ["Found", "ImageSource", "source_in"]


@dataclass(frozen=True)
class Found:
    """N images with their sizes, (0, 0) where `reasons` says why there is none, and their captions."""

    images: Origins
    sizes: IntArray
    reasons: dict[int, str]
    captions: list[str | None]


class ImageSource(Protocol):
    """Images that a command line names.

    Attributes:
        unfit: options of `SourceOptions` that say nothing about such images.
        one: what holds them, with many in one file; "" where each has a file of its own.
    """

    unfit: tuple[str, ...]
    one: str

    def read(self, engine: Engine, *, quiet: bool) -> Found:
        """The headers of all."""


def source_in(sources: list[str], options: SourceOptions, *, recursive: bool) -> ImageSource:
    """What `sources` name. No header is read yet, so mistakes are named at once.

    Raises:
        KohyaBucketError: no image is there, several kinds of sources, or captions that cannot be read.
    """
    ending = "." + options.caption_extension.removeprefix(".")
    if ending == "." or not {"/", "\\", "\0"}.isdisjoint(ending):
        raise ConfigError(f"--caption-extension is {options.caption_extension!r}: give an ending such as .txt")
    options = replace(options, caption_extension=ending)
    if (shards := shards_in(sources)) is not None:
        return _Tars(shards, options)
    if (tables := tables_in(sources)) is not None:
        return _Tables(tables, options)
    if paths := list_images(sources, recursive=recursive):
        return _Files(paths, options)
    held = list_images(sources, recursive=recursive, extensions=(".tar", *TABLE_ENDINGS))
    hint = f", but {counted(len(held), 'file')} such as {held[0]}: name these, or a pattern of them" if held else ""
    raise ConfigError(f"{', '.join(sources)}: no images found there{hint}")


class _Files:
    unfit: tuple[str, ...] = ("image_column", "caption_column")
    one = ""

    def __init__(self, paths: list[str], options: SourceOptions) -> None:
        self._paths = paths
        self._captions = _lines(options.captions_file, len(paths))
        if options.captions_file is None:
            self._captions = for_each(
                partial(caption_beside, ending=options.caption_extension), paths, at_once=REQUESTS
            )

    def read(self, engine: Engine, *, quiet: bool) -> Found:
        with scan_progress("reading headers", quiet=quiet) as progress:
            scan = read_sizes(self._paths, engine=engine, progress=progress)
        reasons = {i: why for i, _, why in scan.failures}
        return Found(Origins.named(absolute_paths(self._paths)), scan.sizes, reasons, self._captions)


class _Tars:
    unfit: tuple[str, ...] = ("image_column", "caption_column")

    def __init__(self, shards: list[str], options: SourceOptions) -> None:
        self._shards, self._options = shards, options
        self.one = shards[0]

    def read(self, engine: Engine, *, quiet: bool) -> Found:
        options = self._options
        ending = options.caption_extension if options.captions_file is None else None
        with scan_progress("reading headers of shards", quiet=quiet) as progress:
            index = TarIndex.build(self._shards, caption=ending, engine=engine, progress=progress)
        images, again = Origins.of_tars(index)
        sizes = index.sizes
        sizes[list(again)] = 0
        given = options.captions_file
        captions = _captions_in(index, images) if given is None else _lines(given, len(index))
        return Found(images, sizes, index.reasons | again, captions)


def _captions_in(index: TarIndex, images: Origins) -> list[str | None]:
    """The captions of the samples of tars, which have not changed since."""
    captions = for_each(partial(_of_sample, index, images), range(len(index)), at_once=REQUESTS)
    for_each(Container.checked, images.containers)
    return captions


def _of_sample(index: TarIndex, images: Origins, i: int) -> str | None:
    row = index.rows[i]
    if not row["caption_offset"]:
        return None
    member = f"{images.names[i]}.{index.caption}"
    tar = images.containers[int(row["shard"])].path
    try:
        content = read_unchanged(tar, None, int(row["caption_offset"]), int(row["caption_length"]))
    except OSError as error:
        raise ConfigError(f"{member}: the caption cannot be read ({error})") from error
    return caption_of_file(content, member)


class _Tables:
    unfit: tuple[str, ...] = ("caption_extension",)

    def __init__(self, paths: list[str], options: SourceOptions) -> None:
        self._paths, self._options = paths, options
        self.one = paths[0]

    def read(self, engine: Engine, *, quiet: bool) -> Found:
        image, caption = self._options.image_column, self._options.caption_column
        with scan_progress("reading headers of tables", quiet=quiet) as progress:
            tables = for_each(partial(scan_rows, image, caption), self._paths, engine, progress)
        containers = [Container(path, t.stamp, image) for path, t in zip(self._paths, tables, strict=True)]
        images = Origins.of_rows(containers, tables)
        sizes = np.concatenate([table.sizes for table in tables])
        starts = accumulate((len(table.sizes) for table in tables), initial=0)
        reasons = {start + row: why for start, t in zip(starts, tables, strict=False) for row, why in t.reasons.items()}
        captions = _lines(self._options.captions_file, len(images))
        if caption is not None:
            cells = [cell for table in tables for cell in table.captions or ()]
            captions = [
                None if cell is None else caption_of_cell(cell, name)
                for cell, name in zip(cells, images.names, strict=True)
            ]
        return Found(images, sizes, reasons, captions)


def _lines(file: Path | None, images: int) -> list[str | None]:
    """The captions in a file, one for each image; None for each where there is no file."""
    if file is None:
        return [None] * images
    try:
        lines: list[str | None] = [*read_text(file, None).splitlines()]
    except ConfigError as error:
        raise ConfigError(f"{file}: the caption cannot be read ({error}); it must be UTF-8 text") from None
    if len(lines) != images:
        raise ConfigError(
            f"{file} has {counted(len(lines), 'line')} for {counted(images, 'image')}: give one per image, in order"
        )
    return lines
