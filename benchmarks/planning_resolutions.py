"""Planning epochs of images that are trained at several resolutions, beside the plain plan: a part of planning.py."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from kohya_bucket import KohyaBuckets  # noqa: E402
from kohya_bucket.planning import EpochPlanner  # noqa: E402

RESOLUTIONS = (512, 768, 1024)
MODES: dict[str, dict[str, Any]] = {
    "one": {},
    "all": {"resolution_mode": "all"},
    "rotate": {"resolution_mode": "rotate"},
    "weighted": {"resolution_mode": "weighted", "resolution_weights": [2, 1, 1]},
}
BATCH = 8
EPOCHS = 5
HEADER = ["images", "resolutions", "trainings", "build and first epoch, ms", "each further epoch, ms", "peak MB"]


def bucket_ids(sizes: np.ndarray, mode: str) -> np.ndarray:
    """[N] bucket numbers at the largest resolution, or [N, R] at all, each with its own buckets."""
    columns, first = [], 0
    for resolution in RESOLUTIONS if mode != "one" else RESOLUTIONS[-1:]:
        columns.append(KohyaBuckets(resolution).place(sizes).bucket_index + first)
        first = int(columns[-1].max()) + 1
    return columns[0] if mode == "one" else np.stack(columns, axis=1)


def timed(ids: np.ndarray, mode: str) -> tuple[float, list[float], int]:
    """(seconds for the first plan, for each of the following ones, trainings of an epoch)."""
    began = time.perf_counter()
    planner = EpochPlanner(ids, BATCH, equal_epochs=True, **MODES[mode])
    trainings = int(planner.plan(epoch=0).length.sum())
    first, later = time.perf_counter() - began, []
    for epoch in range(1, EPOCHS):
        began = time.perf_counter()
        planner.plan(epoch=epoch)
        later.append(time.perf_counter() - began)
    return first, later, trainings


def measure(sizes: np.ndarray, rounds: int) -> list[list[str]]:
    """One row per mode: medians over rounds, in each of which every mode ran once."""
    ids = {mode: bucket_ids(sizes, mode) for mode in MODES}
    runs: dict[str, list[tuple[float, list[float], int]]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        for mode in MODES:
            run = timed(ids[mode], mode)
            runs[mode] += [run] if number else []  # the first round warms up
    rows = []
    for mode in MODES:
        first = statistics.median(run[0] for run in runs[mode]) * 1e3
        later = statistics.median(seconds for run in runs[mode] for seconds in run[1]) * 1e3
        command = [sys.executable, str(REPO / "benchmarks" / "planning.py"), "--child"]
        done = subprocess.run(
            [*command, json.dumps([f"resolutions {mode}", len(sizes)])], capture_output=True, text=True, check=True
        )
        memory = json.loads(done.stdout.splitlines()[-1])
        name = mode if mode == "one" else f"{len(RESOLUTIONS)}, {mode}"
        rows.append(
            [f"{len(sizes):,}", name, f"{runs[mode][0][2]:,}", f"{first:,.0f}", f"{later:,.0f}",
             "-" if memory is None else f"{memory:,.0f}"]
        )  # fmt: skip
    return rows
