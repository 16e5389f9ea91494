"""Ranks that wait for each other's clips, predicted; and how long a plan of a million clips takes.

    python benchmarks/idle_clips.py

2,000 items, half of them images and half clips of 25, 45 or 81 frames, of four aspects, or of aspects scattered around
those; Wan 2.1 1.3B. Three ways of giving batches to 8 ranks: shuffled and dealt out, one shape per step, equal cost.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from origin import commit  # noqa: E402

from kohya_bucket import KohyaBuckets  # noqa: E402
from kohya_bucket.latents.architectures import TOKEN_GRIDS  # noqa: E402
from kohya_bucket.planning import EpochPlanner, dealt_costs, lost_share, lost_share_of, trained_cost  # noqa: E402

RANKS = 8
MODEL = TOKEN_GRIDS["wan-1.3b"]
FRAMES = np.array([1, 25, 45, 81])
TOKENS = 33_000
EPOCHS = 5
HEADER = [
    "buckets", "batch", "largest batch", "shuffled", "one shape", "equal cost", "steps of each",
    "repeated: one shape", "repeated: equal cost",
]  # fmt: skip
PLAN_HEADER = ["clips", "buckets", "ranks", "one shape, ms", "equal cost, ms", "mixed steps"]


def clips(n: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """([n] bucket ids, [K] tokens of each bucket)."""
    rng = np.random.default_rng(0)
    aspect = rng.choice([16 / 9, 9 / 16, 4 / 3, 1.0], n, p=[0.45, 0.25, 0.15, 0.15]) * np.exp(rng.normal(0, spread, n))
    side = 640 * np.stack([np.sqrt(aspect), 1 / np.sqrt(aspect)], axis=1)
    placement = KohyaBuckets((832, 480), min_size=256, max_size=1280, reso_steps=32).place(side.astype(np.int32))
    frames = np.where(rng.random(n) < 0.5, 0, rng.integers(1, 4, n))
    used, size = np.unique(placement.bucket_index, return_inverse=True)
    sizes = placement.bucket_set.sizes[used]
    tokens = MODEL.tokens(np.repeat(sizes, len(FRAMES), axis=0), np.tile(FRAMES, len(sizes)))
    return size.reshape(-1) * len(FRAMES) + frames, tokens


def choices(ids: np.ndarray, tokens: np.ndarray, batch: int | None, **budget: Any) -> tuple[list[float], list[Any]]:
    """Shares of the ranks' time that are lost to waiting and repeats: means over epochs; and the first plans."""
    lost: list[list[float]] = []
    for epoch in range(EPOCHS):
        options = {"bucket_tokens": tokens, "token_cost": MODEL.token_cost, **budget}
        alone = EpochPlanner(ids, batch, **options).plan(epoch=epoch)
        costs = dealt_costs(alone, RANKS, epoch)
        plans = [
            EpochPlanner(ids, batch, world_size=RANKS, same_shape=how, **options).plan(epoch=epoch)
            for how in (True, "cost")
        ]
        lost.append([lost_share(costs, trained_cost(alone)), *map(lost_share_of, plans)])
        if epoch == 0:
            first = [len(costs), *plans]
    return [statistics.mean(column) for column in zip(*lost, strict=True)], first


def predicted(n: int, spread: float) -> list[list[str]]:
    ids, tokens = clips(n, spread)
    a, b = MODEL.token_cost
    rows = []
    for name, batch, budget in (
        ("1", 1, {}),
        (f"max_tokens = {TOKENS:,}", None, {"max_tokens": TOKENS}),
        (f"max_cost of {TOKENS:,} tokens", None, {"max_cost": a * TOKENS + b * TOKENS**2}),
    ):
        lost, (steps, one, met) = choices(ids, tokens, batch, **budget)
        largest = int(one.global_batch.max()) // RANKS
        rows.append(
            [
                f"{len(tokens)}", name, f"{largest}", *(f"{share:.1%}" for share in lost),
                f"{steps:,}; {one.steps:,}; {met.steps:,}", f"{one.ledger().repeated:,}", f"{met.ledger().repeated:,}",
            ]
        )  # fmt: skip
    return rows


def planned(n: int = 1_000_000, rounds: int = 5) -> list[list[str]]:
    rows = []
    for ranks in (8, 64):
        ids, tokens = clips(n, 0.1)
        seconds: dict[Any, list[float]] = {True: [], "cost": []}
        for epoch in range(rounds + 1):
            for how, times in seconds.items():
                began = time.perf_counter()
                plan = EpochPlanner(
                    ids, max_tokens=TOKENS, bucket_tokens=tokens, world_size=ranks, same_shape=how
                ).plan(epoch=epoch)
                times.append(time.perf_counter() - began)
        medians = (f"{statistics.median(times[1:]) * 1e3:.0f}" for times in seconds.values())
        rows.append([f"{n:,}", f"{len(tokens)}", f"{ranks}", *medians, f"{len(plan.mixed):,}"])
    return rows


def main() -> None:
    tables = [
        "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---", *["---:"] * (len(head) - 1)], *rows])
        for head, rows in ((HEADER, predicted(2_000, 0) + predicted(2_000, 0.1)), (PLAN_HEADER, planned()))
    ]
    said = (
        f"Predicted share of the time of {RANKS} ranks that is lost, to waiting and to images that are trained again "
        "so that no rank is empty. 2,000 items, half images and half clips of 25, 45 or 81 frames, of four aspects, or "
        "of aspects scattered around those, 832x480; Wan 2.1 1.3B, L tokens cost "
        f"L + L² / {6 * MODEL.width:,}. Means of {EPOCHS} epochs; steps and repeats of the first."
    )
    plans = (
        f"A plan of an epoch of scattered aspects, `max_tokens` = {TOKENS:,}, arguments checked and fingerprint made "
        f"for each; medians. {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, Python "
        f"{platform.python_version()}, numpy {np.__version__}; commit {commit()}."
    )
    text = "\n\n".join(["# Ranks that wait, with clips", said, tables[0], plans, tables[1]]) + "\n"
    (REPO / "benchmarks" / "results" / "idle_clips.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
