"""`kohya-bucket sizes build`: read every header once, and keep what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kohya_bucket.cli.console import say, say_first, scan_progress
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import (
    ENGINE_HELP,
    Recursive,
    Sources,
    Workers,
    check_output,
    engine_of,
)
from kohya_bucket.texts import counted

SUBCOMMANDS = ("build",)


def build(
    path: Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="The Parquet file to write.")],
    refresh: bool = opt(False, "Reuse rows of --output for unchanged files.", "--refresh"),
    hash: bool = opt(False, "Hash every file's content too, to find duplicates.", "--hash"),
    recursive: Recursive = True,
    workers: Workers = None,
    engine: str = opt("local", ENGINE_HELP, usual=False),
    quiet: bool = opt(False, "Print nothing but errors.", "--quiet", "-q", usual=False),
) -> None:
    """Read the size of every image into a Parquet file, so that later runs open none of them."""
    from kohya_bucket.cli.sources import images_in, tars_in
    from kohya_bucket.images import MetadataCache, ScanInterrupted
    from kohya_bucket.images.metadata_cache import is_metadata_cache
    from kohya_bucket.images.tar_index import is_tar_index

    kinds = is_metadata_cache, is_tar_index
    check_output("--output", output, "a Parquet file", path, lambda file: any(kind(str(file)) for kind in kinds))
    runs_on = engine_of(engine)
    if (tars := tars_in(path, output if refresh and output.is_file() else None)) is not None:
        tars.save(output)
        if not quiet:
            say(f"{len(tars)} images of {counted(len(tars.shards), 'shard')} in {output}")
        return
    read = MetadataCache.load(output).refresh if refresh and output.exists() else MetadataCache.build
    paths = images_in(path, recursive=recursive)
    try:
        with scan_progress("reading headers", quiet=quiet) as progress:
            cache = read(paths, hash=hash, workers=workers, engine=runs_on, progress=progress)
    except ScanInterrupted as interrupt:
        if interrupt.cache is not None and len(interrupt.cache):
            interrupt.cache.save(output)
            kept = f"{counted(len(interrupt.cache), 'row')} kept in {output}: continue with --refresh"
            raise KeyboardInterrupt(f"{interrupt}; {kept}") from None
        raise
    cache.save(output)
    changes = cache.changes
    if quiet or changes is None:
        return
    say(
        f"{counted(len(cache), 'file')} in {output}: {changes.reused} unchanged, {changes.reread} read again, "
        f"{changes.added} new, {changes.dropped} gone, {changes.unreadable} unreadable"
    )
    lines = [f"{cache.paths[i]}: {cache.reasons[i]}" for i in sorted(cache.reasons)]
    say_first(lines, rest="; all of them are in the file's column 'reason'", err=True)
