"""Placing images: sizes in, buckets out, against sd-scripts and bucketsampler in the same run.

    SD_SCRIPTS_DIR=... BUCKETSAMPLER_DIR=... python benchmarks/placement.py [--counts 10000,100000] [--rounds 5]

Run it with a Python that has sd-scripts' requirements (its `select_bucket` sits in a module that imports
them all) and pydantic for bucketsampler. A peer whose folder is not given is left out, and the table says so.

In each round every contestant runs once, so that what else the machine does falls on all alike; a ratio is the
median over rounds of the ratio within a round. Each runs once untimed before each timed run (up to a million
images), because in a virtual machine the first touch of fresh memory can cost more than the work. Every contestant
keeps its results, as sd-scripts does in its image records. Peak memory is how far a fresh process's resident memory
rises meanwhile (Linux only).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from kohya_bucket import KohyaBuckets  # noqa: E402

RESOLUTION, LOW, HIGH, STEPS = 1024, 256, 2048, 64
FULL, INDEX, SD, BS = "kohya_bucket, all of Placement", "kohya_bucket, index only", "sd-scripts", "bucketsampler"
MODES = {"upscaling allowed": False, "no upscale": True}
Contestant = Callable[..., Any]


def image_sizes(n: int) -> np.ndarray:
    """[n, 2] int32: sides uniform from 256 to 4096 pixels; one in seven images is below the area of 1024x1024."""
    return np.random.default_rng(0).integers(256, 4097, (n, 2)).astype(np.int32)


def contestants(no_upscale: bool) -> dict[str, Contestant]:
    """Name -> function of an [n, 2] array. sd-scripts gets what it takes: one pair of Python ints after another."""
    rule = KohyaBuckets(RESOLUTION, LOW, HIGH, STEPS, no_upscale=no_upscale)
    out: dict[str, Contestant] = {FULL: rule.place, INDEX: rule.assign_many_indices}
    if "SD_SCRIPTS_DIR" in os.environ:
        sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            from library.train_util import BucketManager
        manager = BucketManager(no_upscale, (RESOLUTION, RESOLUTION), LOW, HIGH, STEPS)
        if not no_upscale:
            manager.make_buckets()
        out[SD] = partial(_one_by_one, manager.select_bucket)
    if "BUCKETSAMPLER_DIR" in os.environ and not no_upscale:
        sys.path.insert(0, os.environ["BUCKETSAMPLER_DIR"])
        import bucketsampler

        buckets = bucketsampler.BucketSet(tuple(bucketsampler.Bucket(w, h) for w, h in rule.bucket_set))
        out[BS] = lambda sizes: bucketsampler.assign_many_indices(sizes, buckets)
    return out


def _one_by_one(select: Callable[[int, int], Any], pairs: list[list[int]]) -> list[Any]:
    return [select(width, height) for width, height in pairs]


def peak_mb(mode: str, name: str, n: int) -> float | None:
    """Growth of the high-water mark of a fresh process while `name` places `n` images."""
    command = [sys.executable, __file__, "--child", json.dumps([mode, name, n])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def child(mode: str, name: str, n: int) -> float | None:
    place, sizes = contestants(MODES[mode])[name], image_sizes(n)
    given = sizes.tolist() if name == SD else sizes
    place(given[:1000])
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew from what is held now
        before = _status_mb("VmRSS")
        kept = place(given)
        after = _status_mb("VmHWM")
        del kept
        return after - before
    return None


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024 / 1e6


def measure(mode: str, n: int, rounds: int) -> list[list[str]]:
    sizes, runs = image_sizes(n), contestants(MODES[mode])
    given = {name: sizes.tolist() if name == SD else sizes for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, place in runs.items():
            place(given[name][:1_000_000])
            start = time.perf_counter()
            kept = place(given[name])
            seconds[name].append(time.perf_counter() - start)
            del kept
    rows = []
    for name, taken in seconds.items():
        ratios = [
            statistics.median(p / t for p, t in zip(seconds[peer], taken, strict=True)) if peer in seconds else None
            for peer in (SD, BS)
        ]
        memory = peak_mb(mode, name, n)
        rows.append(
            [
                mode, f"{n:,}", name, f"{n / statistics.median(taken) / 1e6:.2f}",
                *("-" if r is None else f"{r:.1f}" for r in ratios),
                "-" if memory is None else f"{memory:,.0f}",
            ]
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="10000,100000,1000000,10000000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(*json.loads(args.child))))
        return
    head = ["mode", "images", "contestant", "M images/s", "x sd-scripts", "x bucketsampler", "peak MB"]
    lines = [head, ["---", *["---:"] * 1, "---", *["---:"] * 4]]
    for mode in MODES:
        for n in map(int, args.counts.split(",")):
            lines += measure(mode, n, args.rounds if n <= 1_000_000 else max(3, args.rounds // 2))
    table = "\n".join("| " + " | ".join(row) + " |" for row in lines)
    missing = [
        f"{v} is not set: its rows are left out" for v in ("SD_SCRIPTS_DIR", "BUCKETSAMPLER_DIR") if v not in os.environ
    ]
    note = (
        f"{RESOLUTION}x{RESOLUTION}, sides {LOW} to {HIGH} in steps of {STEPS}; medians of rounds in which each "
        "contestant ran once. sd-scripts: `BucketManager.select_bucket` per image (bucket, resized size, aspect "
        "error). bucketsampler: `assign_many_indices` (index only; it has no no-upscale mode). `Placement` holds "
        "bucket, resized size, SDXL crop box, aspect error, crop loss and reason. "
        f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores."
    )
    text = "\n\n".join(["# Placing images", table, note, *missing]) + "\n"
    (REPO / "benchmarks" / "results" / "placement.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
