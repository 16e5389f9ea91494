"""What it costs that npz are whole, on disk and read again: rounds of runs, against `np.savez` as sd-scripts calls it.

python benchmarks/npz_writing.py [--files 300] [--rounds 7] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from origin import commit

from kohya_bucket.files import GroupedSync
from kohya_bucket.latents.fingerprint import Fingerprint
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.check import holds_npz, npz_entry
from kohya_bucket.trainers.sdscripts.npz.read_write import NpzLatents, write_npz

ARCH, BUCKET, GROUP = ARCHITECTURES["sdxl"], (1024, 1024), 64
PRINT = Fingerprint(100, 200, "", "vae", BUCKET, BUCKET, (0, 0), "none", "float32", flip=True)
VALUES = np.random.default_rng(0).standard_normal((16, 4, 128, 128), dtype=np.float32)


def plain(paths: list[Path]) -> None:
    for i, path in enumerate(paths):
        value = VALUES[i % len(VALUES)]
        np.savez(path, latents=value, original_size=np.array(BUCKET), crop_ltrb=np.array((0.0, 0, 1024, 1024)),
                 latents_flipped=value)  # fmt: skip


def ours(paths: list[Path], *, sync: bool) -> None:
    for i, path in enumerate(paths):
        value = VALUES[i % len(VALUES)]
        write_npz(path, NpzLatents(value, BUCKET, (0.0, 0.0, 1024.0, 1024.0), value), BUCKET, ARCH, PRINT, sync=sync)


def in_groups(paths: list[Path]) -> None:
    """As `precompute` does it, without its threads that write."""
    with ThreadPoolExecutor(4) as pool:
        groups = GroupedSync(pool, GROUP)
        for path in paths:
            ours([path], sync=False)
            groups.add(path)
        groups.finish()


WAYS: dict[str, Callable[[list[Path]], None]] = {
    "np.savez, nothing synced": plain,
    "whole or not at all, nothing synced": lambda paths: ours(paths, sync=False),
    "the same, synced in groups of 64 (`precompute`)": in_groups,
    "the same, each synced by itself": lambda paths: ours(paths, sync=True),
}


def shapes_only(paths: list[Path], _: Path) -> None:
    assert all(holds_npz(path, BUCKET, ARCH) for path in paths)


def every_byte(paths: list[Path], image: Path) -> None:
    wanted = StoreEntry("a.png", PRINT, BUCKET, (0.0, 0.0, 1024.0, 1024.0))
    assert not any(npz_entry(path, wanted, ARCH, image).reasons for path in paths)


def checking(files: int, rounds: int, folder: Path | None) -> list[str]:
    root = Path(tempfile.mkdtemp(prefix="npz", dir=folder))
    image, paths = root / "a.png", [root / f"{i:06d}_1024x1024_sdxl.npz" for i in range(files)]
    image.write_bytes(bytes(PRINT.source_bytes))
    os.utime(image, ns=(PRINT.source_mtime_ns, PRINT.source_mtime_ns))
    ours(paths, sync=True)
    lines = ["| check of files in the system's cache | ms a file, median (range) |", "| --- | ---: |"]
    for name, check in {"names and shapes (`--skip_cache_check`)": shapes_only, "every byte": every_byte}.items():
        found = []
        for _ in range(rounds):
            start = time.perf_counter()
            check(paths, image)
            found.append((time.perf_counter() - start) / files * 1e3)
        lines.append(f"| {name} | {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}) |")
    megabytes = sum(path.stat().st_size for path in paths) / files / 1e6
    shutil.rmtree(root)
    return [*lines, "", f"Files of {megabytes:.2f} MB."]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write the files that are measured")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(options.rounds):
        for name, write in WAYS.items():
            root = Path(tempfile.mkdtemp(prefix="npz", dir=options.folder))
            os.sync()
            start = time.perf_counter()
            write([root / f"{i:06d}_1024x1024_sdxl.npz" for i in range(options.files)])
            rates[name].append(options.files / (time.perf_counter() - start))
            shutil.rmtree(root)
    first = rates[next(iter(WAYS))]
    lines = ["| | files/s, median (range) | times as long, median of rounds |", "| --- | ---: | ---: |"]
    for name, found in rates.items():
        ratio = statistics.median(a / b for a, b in zip(first, found, strict=True))
        lines.append(
            f"| {name} | {statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f}) | {ratio:.2f} |"
        )
    lines += ["", f"{options.files} SDXL latents of 1024x1024 with flips; {options.rounds} rounds; "
              f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}; commit {commit()}."]  # fmt: skip
    lines += ["", *checking(options.files, options.rounds, options.folder)]
    text = "\n".join(lines) + "\n"
    print(text)
    output = Path(__file__).parent / "results" / "npz_writing.md"
    output.write_text(f"# Writing npz (`benchmarks/npz_writing.py`)\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
