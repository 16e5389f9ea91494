"""The images that a command line names: files and folders, lists, tables of sizes, tar shards, tables of images."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kohya_bucket.cli.console import scan_progress
from kohya_bucket.cli.options import SourceOptions
from kohya_bucket.datasets.captions import caption_beside, caption_of_cell, caption_of_file
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.images import list_images, read_sizes
from kohya_bucket.images.formats import IMAGE_EXTENSIONS, format_of_extension
from kohya_bucket.images.image_rows import scan_rows
from kohya_bucket.images.listing import absolute_paths, matches_of
from kohya_bucket.images.origins import Container, Origins
from kohya_bucket.images.parallel import REQUESTS, for_each
from kohya_bucket.images.remote import is_url, list_remote
from kohya_bucket.images.size_table import TABLE_SUFFIXES, read_size_table
from kohya_bucket.images.stamps import read_unchanged
from kohya_bucket.images.tar_index import TarIndex
from kohya_bucket.inputs import MAX_TABLE_BYTES
from kohya_bucket.texts import counted, read_text
from kohya_bucket.trainers.door.registry import usual_trainer

if TYPE_CHECKING:
    from kohya_bucket.buckets.sizes import IntArray
    from kohya_bucket.images.parallel import Engine


_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def tars_in(
    sources: Sequence[str], before: Path | None = None, engine: Engine = "auto", **more: bool
) -> TarIndex | None:
    """The index of the shards that are named; None where no tar is.

    Of an earlier index, in the file `before`, those that have not changed are taken. `ConfigError` where an option is
    on that asks for `more` than headers.
    """
    if not (shards := _shards_in(sources)):
        return None
    _refuse(more, f"{shards[0]}: of images in tars only headers are read")
    return TarIndex.build(shards, before=None if before is None else TarIndex.load(before), engine=engine)


def size_table_in(sources: Sequence[str], **more: bool) -> str | None:
    """The table of sizes that is named; None where it is something else. `ConfigError` as `tars_in`."""
    if len(sources) != 1 or not _is_table(sources[0]):
        return None
    _refuse(more, f"{sources[0]}: of images in a table there are only sizes")
    return sources[0]


def _is_table(source: str) -> bool:
    return Path(source).suffix.lower() in TABLE_SUFFIXES and Path(source).is_file()


def _refuse(more: Mapping[str, bool], why: str) -> None:
    if asked := [f"--{name}" for name, is_on in more.items() if is_on]:
        raise ConfigError(f"{why}: leave out {' and '.join(asked)}")


def _refuse_tables(sources: Sequence[str]) -> None:
    """Raise `ConfigError` for what would be taken for an image, which it never is."""
    if table := next(filter(_is_table, sources), None):
        raise ConfigError(
            f"{table} is a table, not an image: `compare`, `analyze` and `buckets make` take one table of sizes, and "
            "`precompute` takes tables of images (.parquet)"
        )


def _shards_in(sources: Sequence[str]) -> list[str]:
    """The tars that are named, each once."""
    names = _matches(sources, (".tar",))
    if packed := next((name for name in names if name.lower().endswith(_PACKED)), None):
        raise KohyaBucketError(
            f"{packed}: is compressed, so that its images cannot be read at random: unpack it to a plain .tar"
        )
    return _of_one_kind(names, lambda name: name.lower().endswith(".tar"), "is a tar shard")


def _of_one_kind(names: Sequence[str], is_one: Callable[[str], bool], what: str) -> list[str]:
    """The names that are of a kind: none, or all. `KohyaBucketError` for a mixture; `what` says which kind it is."""
    of_kind = [name for name in names if is_one(name)]
    if 0 < len(of_kind) < len(names):
        other = next(name for name in names if name not in of_kind)
        raise KohyaBucketError(f"{of_kind[0]} {what}, and {other} is not one: name one kind alone")
    return of_kind


def _matches(sources: Sequence[str], endings: Sequence[str]) -> list[str]:
    """What patterns match, and the other sources as they are, each once; of addresses those with one of `endings`."""
    names: list[str] = []
    for source in sources:
        matches: list[str] = []
        if is_url(source) and glob.has_magic(source) and source.lower().endswith(tuple(endings)):
            matches = list_remote(source, True, endings)
        elif not is_url(source) and glob.has_magic(source) and not Path(source).exists():
            names += sorted(matches_of(source, recursive=False))
            continue
        names += matches or [source]
    return list(dict.fromkeys(names))


_HUB = "hf://datasets/"


def _tables_in(sources: Sequence[str]) -> list[str]:
    def is_table(name: str) -> bool:
        return name.lower().endswith(".parquet") or _is_on_hub(name)

    tables = _of_one_kind(_matches(sources, (".parquet",)), is_table, "is a table of images")
    return list(dict.fromkeys(absolute_paths(file for name in tables for file in _files_of(name))))


def _is_on_hub(name: str) -> bool:
    return name.startswith(_HUB) and len(name.removeprefix(_HUB).strip("/").split("/")) == 2


def _files_of(name: str) -> list[str]:
    if not _is_on_hub(name):
        return [name]
    parquet_files = list_remote(name, True, [".parquet"])
    if not parquet_files:
        raise KohyaBucketError(
            f"{name}: has no Parquet files; the Hub's own copy in Parquet, if it made one, is at "
            f"{name.rstrip('/')}@~parquet"
        )
    return parquet_files


@dataclass(frozen=True)
class SizedImages:
    """Readable sizes [N, 2]; how many images had none, and how many files sd-scripts does not take for images.

    `in_table`: the images are the rows of a table of sizes.
    """

    sizes: IntArray
    unreadable: int
    source: str
    foreign: int = 0
    in_table: bool = False

    def __str__(self) -> str:
        why = "without a size" if self.in_table else "unreadable"
        broken = f" ({self.unreadable:,} {why} left out)" if self.unreadable else ""
        foreign = f" ({self.foreign:,} left out that sd-scripts does not read)" if self.foreign else ""
        return f"{counted(len(self.sizes), 'image')} of {self.source}{broken}{foreign}"


def images_in(
    sources: list[str], *, recursive: bool = True, extensions: Collection[str] = IMAGE_EXTENSIONS
) -> list[str]:
    """`list_images`; `KohyaBucketError` where there is none, or a table."""
    _refuse_tables(sources)
    paths = list_images(sources, recursive=recursive, extensions=extensions)
    if not paths:
        raise KohyaBucketError(f"{', '.join(sources)}: no images found there")
    return paths


def not_read(paths: Sequence[str]) -> dict[str, str]:
    """{path: why} of images that the usual trainer takes for none by their names, such as GIFs."""
    trainer = usual_trainer()
    trained_endings = trainer.endings()
    endings = ((path, os.path.splitext(path)[1]) for path in paths)  # noqa: PTH122
    return {
        path: f"{trainer.name} lists no {ending} files: `kohya-bucket fix` converts or renames it"
        for path, ending in endings
        if (ending.lower() if os.name == "nt" else ending) not in trained_endings and format_of_extension(ending)
    }


def sizes_of(
    sources: list[str], *, recursive: bool = True, workers: int | None = None, quiet: bool = False
) -> SizedImages:
    """Read headers, of tar shards too, or what is named: a table (CSV, JSON, Parquet, also one of `cache sizes`) or an
    index of tar shards. `KohyaBucketError` where there is nothing readable.
    """
    source, foreign, table = ", ".join(sources), dict[str, str](), size_table_in(sources)
    if (tars := tars_in(sources)) is not None:
        sizes = tars.sizes
    elif table is not None:
        sizes = read_size_table(table)
    else:
        paths = images_in(sources, recursive=recursive)
        with scan_progress("reading headers", quiet=quiet) as progress:
            sizes = read_sizes(paths, workers=workers, progress=progress).sizes
        foreign = not_read(paths)
        sizes = sizes[[path not in foreign for path in paths]]
    readable = sizes[sizes.min(axis=1, initial=1) > 0]
    if not len(readable):
        raise KohyaBucketError(f"{source}: none of its {len(sizes)} images has a readable size")
    return SizedImages(readable, len(sizes) - len(readable), source, len(foreign), table is not None)


@dataclass(frozen=True)
class ScannedImages:
    """N images with their sizes, (0, 0) where `reasons` says why there is none, and their captions; None if none
    were asked for."""

    images: Origins
    sizes: IntArray
    reasons: dict[int, str]
    captions: list[str | None] | None


@dataclass(frozen=True)
class ImageInput:
    """Images that a command line names.

    Attributes:
        read: by (engine, quiet) the headers of all.
        unfit: options of `SourceOptions` that say nothing about such images.
        one: what holds them, with many in one file; "" where each has a file of its own.
    """

    read: Callable[[Engine, bool], ScannedImages]
    unfit: tuple[str, ...] = ("image_column", "caption_column")
    one: str = ""


def source_in(sources: list[str], options: SourceOptions, *, recursive: bool) -> ImageInput:
    """What `sources` name. No header is read yet, so mistakes are named at once."""
    ending = "." + options.caption_extension.removeprefix(".")
    if ending == "." or not {"/", "\\", "\0"}.isdisjoint(ending):
        raise ConfigError(f"--caption-extension is {options.caption_extension!r}: give an ending such as .txt")
    options = replace(options, caption_extension=ending)
    if shards := _shards_in(sources):
        return ImageInput(partial(_read_tars, shards, options), one=shards[0])
    if tables := _tables_in(sources):
        return ImageInput(partial(_read_tables, tables, options), ("caption_extension",), tables[0])
    _refuse_tables(sources)
    if paths := list_images(sources, recursive=recursive):
        beside = partial(caption_beside, ending=ending)
        lines = options.captions_file
        captions = for_each(beside, paths, at_once=REQUESTS) if lines is None else _lines(lines, len(paths))
        return ImageInput(partial(_read_files, paths, captions))
    held = list_images(sources, recursive=recursive, extensions=(".tar", ".parquet", ".arrow"))
    is_saved = bool(held) and held[0].lower().endswith(".arrow")  # by `Dataset.save_to_disk`
    what_to_do = "write them as Parquet (Dataset.to_parquet)" if is_saved else "name these, or a pattern of them"
    hint = f", but {counted(len(held), 'file')} such as {held[0]}: {what_to_do}" if held else ""
    raise ConfigError(f"{', '.join(sources)}: no images found there{hint}")


def _read_files(paths: list[str], captions: list[str | None], engine: Engine, quiet: bool) -> ScannedImages:
    with scan_progress("reading headers", quiet=quiet) as progress:
        scan = read_sizes(paths, engine=engine, progress=progress)
    return ScannedImages(
        Origins.named(absolute_paths(paths)), scan.sizes, {i: why for i, _, why in scan.failures}, captions
    )


def _read_tars(shards: list[str], options: SourceOptions, engine: Engine, quiet: bool) -> ScannedImages:
    lines = options.captions_file
    with scan_progress("reading headers of shards", quiet=quiet) as progress:
        ending = options.caption_extension if lines is None else None
        index = TarIndex.build(shards, caption=ending, engine=engine, progress=progress)
    images, left_out = Origins.of_tars(index)
    sizes = index.sizes
    sizes[list(left_out)] = 0
    if lines is None:
        captions = for_each(partial(_of_sample, index, images), range(len(index)), at_once=REQUESTS)
        for_each(Container.checked, images.containers)  # none has changed since
    else:
        captions = _lines(lines, len(index))
    return ScannedImages(images, sizes, index.reasons | left_out, captions)


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


def _read_tables(paths: list[str], options: SourceOptions, engine: Engine, quiet: bool) -> ScannedImages:
    image, caption = options.image_column, options.caption_column
    with scan_progress("reading headers of tables", quiet=quiet) as progress:
        tables = for_each(partial(scan_rows, image, caption), paths, engine, progress)
    containers = [Container(path, t.stamp, image) for path, t in zip(paths, tables, strict=True)]
    images = Origins.of_rows(containers, tables)
    sizes = np.concatenate([table.sizes for table in tables])
    starts = accumulate((len(table.sizes) for table in tables), initial=0)
    reasons = {start + row: why for start, t in zip(starts, tables, strict=False) for row, why in t.reasons.items()}
    if caption is None:
        lines = options.captions_file
        return ScannedImages(images, sizes, reasons, None if lines is None else _lines(lines, len(images)))
    cells = zip((cell for table in tables for cell in table.captions or ()), images.names, strict=True)
    captions = [None if cell is None else caption_of_cell(cell, name) for cell, name in cells]
    return ScannedImages(images, sizes, reasons, captions)


def _lines(file: Path, images: int) -> list[str | None]:
    """The captions in a file, one for each image."""
    try:
        lines: list[str | None] = [line.removesuffix("\n") for line in StringIO(read_text(file, MAX_TABLE_BYTES))]
    except ConfigError as error:
        raise ConfigError(f"{file}: the caption cannot be read ({error}); it must be UTF-8 text") from None
    if len(lines) != images:
        raise ConfigError(
            f"{file} has {counted(len(lines), 'line')} for {counted(images, 'image')}: give one per image, in order"
        )
    return lines
