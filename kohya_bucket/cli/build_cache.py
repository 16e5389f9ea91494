"""`kohya-bucket build-cache`: read every header once, and keep what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kohya_bucket.cli.console import plain_console
from kohya_bucket.cli.engines import ENGINE_HELP, engine_of
from kohya_bucket.cli.outputs import check_output
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import MetadataCache, ScanInterrupted, list_images
from kohya_bucket.images.parquet import is_metadata_cache
from kohya_bucket.images.pool import Engine, Progress

_SHOWN = 10


def register(app: typer.Typer) -> None:
    @app.command("build-cache")
    def build_cache(
        path: Annotated[list[str], typer.Argument(help="Folders, files, patterns, or .txt lists of paths.")],
        output: Annotated[Path, typer.Option("--output", "-o", help="The Parquet file to write.")],
        refresh: Annotated[bool, typer.Option("--refresh", help="Reuse rows of --output for unchanged files.")] = False,
        hash: Annotated[
            bool, typer.Option("--hash", help="Hash every file's content too, to find duplicates.")
        ] = False,
        recursive: Annotated[bool, typer.Option(help="Look into subfolders.")] = True,
        workers: Annotated[int | None, typer.Option(min=1, help="At most this many threads or processes.")] = None,
        engine: Annotated[str, typer.Option(help=ENGINE_HELP)] = "local",
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    ) -> None:
        """Read the size of every image into a Parquet file, so that later runs open none of them."""
        check_output("--output", output, "a Parquet file", path)
        runs_on = engine_of(engine)
        if output.is_file() and output.stat().st_size and not is_metadata_cache(str(output)):
            raise KohyaBucketError(
                f"--output is {output}, a file that no build-cache wrote, and would be lost: give another name, or "
                "delete it first"
            )
        before = MetadataCache.load(output) if refresh and output.exists() else None
        try:
            with scan_progress("reading headers", quiet=quiet) as progress:
                cache = _build(path, before, recursive, hash, workers, runs_on, progress)
        except ScanInterrupted as interrupt:
            if interrupt.cache is not None and len(interrupt.cache):
                interrupt.cache.save(output)
                kept = f"{len(interrupt.cache)} rows kept in {output}: go on with --refresh"
                raise KeyboardInterrupt(f"{interrupt}; {kept}") from None
            raise
        cache.save(output)
        if not quiet:
            _report(cache, output)


def _build(
    sources: list[str], before: MetadataCache | None, recursive: bool, hash: bool, workers: int | None, engine: Engine,
    progress: Progress | None,
) -> MetadataCache:  # fmt: skip
    paths = list_images(sources, recursive=recursive)
    if not paths:
        raise KohyaBucketError(f"{', '.join(sources)}: no images found there")
    if before is None:
        return MetadataCache.build(paths, hash=hash, workers=workers, engine=engine, progress=progress)
    return before.refresh(paths, hash=hash, workers=workers, engine=engine, progress=progress)


def _report(cache: MetadataCache, output: Path) -> None:
    changes = cache.changes
    assert changes is not None
    typer.echo(
        f"{len(cache)} files in {output}: {changes.reused} unchanged, {changes.reread} read again, "
        f"{changes.added} new, {changes.dropped} gone, {changes.unreadable} unreadable"
    )
    console = plain_console(stderr=True)
    for i in sorted(cache.reasons)[:_SHOWN]:
        console.print(f"  {cache.paths[i]}: {cache.reasons[i]}", markup=False, soft_wrap=True)
    if len(cache.reasons) > _SHOWN:
        console.print(f"  and {len(cache.reasons) - _SHOWN} more; all of them are in the file's column 'reason'")
