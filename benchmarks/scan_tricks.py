"""What each trick for speed in `kohya_bucket.images` gains: with it and without it, by turns, over the same files.

A trick that gains less than a tenth is not worth its lines. Run from the repository root:

    python benchmarks/scan_tricks.py --files 100000 --rounds 11
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.fs  # noqa: F401 - in use, as it is where a cache is loaded
from scan import Run, make_files, measure, table

from kohya_bucket.images import MetadataCache, read_sizes
from kohya_bucket.images.headers import header, jpeg
from kohya_bucket.images.headers.jpeg import walk_segments


def without(target: str, plain: Any, run: Run) -> Run:
    """`run`, with `plain` in the place of a trick."""

    def swapped(paths: list[str]) -> Any:
        with patch(target, plain):
            return run(paths)

    return swapped


def absolute(paths: list[str]) -> list[str]:
    return [os.path.abspath(path) for path in paths]


def by_turns(title: str, run: Run, others: dict[str, Run], paths: list[str], rounds: int, *, whole: bool) -> str:
    contestants = {name: (one, paths) for name, one in {"as it is": run, **others}.items()}
    return table(title, measure(contestants, rounds, tuple(contestants) if whole else ()), "as it is")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()

    def scan(paths: list[str]) -> Any:
        return read_sizes(paths, engine="alone")

    def walk(head: bytes, source: Any) -> Any:
        return walk_segments(head, source) if head.startswith(b"\xff\xd8\xff") else None

    def unknown(*_: object) -> None:
        return None

    with tempfile.TemporaryDirectory() as folder:
        paths = make_files(Path(folder), options.files)
        jpegs = [path for path in paths if path.endswith(".jpg")]
        cache = MetadataCache.build(paths)

        def refresh(paths: list[str]) -> Any:
            return cache.refresh(paths)

        readers = "kohya_bucket.images.headers.header._readers"
        walking = [walk if reader is jpeg.read_jpeg else reader for reader in header._readers]
        without_patterns = {"JPEG by a walk alone": without(readers, walking, scan)}
        slower: dict[str, Run] = {
            "os.stat of each": without("kohya_bucket.images.scan.work.stat_together", unknown, refresh),
            "on one thread": without("kohya_bucket.images.scan.pool.can_stat_together", unknown, refresh),
            "abspath of each": without("kohya_bucket.images.cache.refresh.absolute_paths", absolute, refresh),
        }
        for title, run, others, some, whole in (
            (f"scan, {len(paths):,} files", scan, without_patterns, paths, False),
            (f"scan, {len(jpegs):,} JPEG", scan, without_patterns, jpegs, False),
            (f"refresh, {len(paths):,} files, nothing changed", refresh, slower, paths, True),
        ):
            print(by_turns(title, run, others, some, options.rounds, whole=whole), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
