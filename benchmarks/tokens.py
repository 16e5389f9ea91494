"""Buckets by tokens beside other rules, and packs beside their lower bound.

    python benchmarks/tokens.py

Rules at 1024x1024 on the demo images of this repository and on 100,000 shapes: what is cropped off, buckets that hold
images, short batches of 4, spread of the tokens of an image, and what `remainder="merge"` saves of the buckets. Packs
of 1,000,000 images: packs against the fewest possible, what is left empty, and the CPU time of the plan.
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

from kohya_bucket import AutoBuckets, KohyaBuckets, NovelAIBuckets  # noqa: E402
from kohya_bucket.buckets.rules.token_band import TokenBandBuckets  # noqa: E402
from kohya_bucket.images import list_images, read_sizes  # noqa: E402
from kohya_bucket.planning import LedgerReason, plan_epoch, plan_packs  # noqa: E402

RULE_HEADER = [
    "images", "rule", "sizes in the set", "used", "cropped off, mean", "99th of 100", "tokens, spread", "short batches",
    "used after merge",
]  # fmt: skip
PACK_HEADER = [
    "images", "sizes", "budget", "packs", "the fewest possible", "left empty", "most between ranks", "CPU ms"
]  # fmt: skip


def shapes(n: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    aspect = rng.choice([2 / 3, 1.0, 1.5, 0.75, 1.78], n, p=[0.4, 0.25, 0.15, 0.1, 0.1]) * np.exp(rng.normal(0, 0.1, n))
    return (1500 * np.stack([np.sqrt(aspect), 1 / np.sqrt(aspect)], axis=1)).astype(np.int32)


def rules(sizes: np.ndarray) -> dict[str, Any]:
    return {
        "kohya, steps of 64": KohyaBuckets(1024),
        "kohya, steps of 32": KohyaBuckets(1024, reso_steps=32),
        "novelai": NovelAIBuckets((1024, 1024), dim_limit=2048, base_res=(1024, 1024)),
        "auto, optimal, 32 sizes": AutoBuckets.from_dims(sizes, num_buckets=32, target=1024, method="optimal"),
        "token_band, 5 %": TokenBandBuckets(1024, 0.05),
        "token_band, 1 %": TokenBandBuckets(1024, 0.01),
    }


def by_rule(name: str, sizes: np.ndarray) -> list[list[str]]:
    rows = []
    for title, rule in rules(sizes).items():
        placed = rule.place(sizes)
        at = placed.placed
        tokens = (placed.bucket_sizes[at].astype(np.int64) / 16).prod(axis=1)
        dims = rule.bucket_set.sizes
        plan = plan_epoch(placed.bucket_index, 4, bucket_sizes=dims)
        merged = plan_epoch(placed.bucket_index, 4, bucket_sizes=dims, remainder="merge", merge_max_crop=0.05)
        loss = placed.crop_loss[at]
        rows.append(
            [
                name, title, f"{len(rule.bucket_set)}", f"{len(np.unique(placed.bucket_index[at]))}",
                f"{loss.mean():.2%}", f"{np.quantile(loss, 0.99):.2%}", f"{tokens.std() / tokens.mean():.1%}",
                f"{int((plan.length < 4).sum()):,} of {plan.steps:,}", f"{len(np.unique(merged.bucket_of_step))}",
            ]
        )  # fmt: skip
        assert not merged.ledger().count(LedgerReason.RANK_FILLED)
    return rows


def in_the_order_of_loading(tokens: list[int], budget: int, open_packs: int) -> int:
    """Packs that a loader fills as images come, each into the first of so many open packs that has room."""
    rooms: list[int] = []
    closed = 0
    for length in tokens:
        fits = next((k for k, room in enumerate(rooms) if room >= length), None)
        if fits is not None:
            rooms[fits] -= length
            continue
        rooms.append(budget - length)
        if len(rooms) > open_packs:
            rooms.remove(min(rooms))
            closed += 1
    return closed + len(rooms)


def beside_loaders(n: int = 20_000, budget: int = 16_384) -> list[list[str]]:
    """What stays empty where packs are filled as images come, and where they are planned."""
    tokens = (TokenBandBuckets(1024, 0.05).place(shapes(n)).bucket_sizes.astype(np.int64) // 16).prod(axis=1)
    which = np.random.default_rng(1).integers(0, 3, n)
    mixed = (tokens * np.array([0.25, 0.5625, 1])[which]).astype(np.int64)
    rows = []
    for title, each in (("1024", tokens), ("512, 768, 1024", mixed)):
        shuffled = np.random.default_rng(0).permutation(each).tolist()
        made = [in_the_order_of_loading(shuffled, budget, packs) for packs in (1, 16, 256)]
        plan = plan_packs(each, budget, world_size=8)
        empty = [1 - float(each.sum()) / (packs * budget) for packs in (*made, plan.tokens.size)]
        rows.append([f"{n:,}", title, *(f"{share:.2%}" for share in empty)])
    return rows


def packs(n: int = 1_000_000, rounds: int = 5) -> list[list[str]]:
    sizes = shapes(n)
    several = [TokenBandBuckets(side, 0.05).place(sizes).bucket_sizes for side in (512, 768, 1024)]
    which = np.random.default_rng(1).integers(0, 3, n)
    rows = []
    for title, placed in (
        ("kohya, steps of 64", KohyaBuckets(1024).place(sizes).bucket_sizes),
        ("token_band, 5 %", several[2]),
        ("token_band at 512, 768, 1024", np.choose(which[:, None], several)),
    ):
        tokens = (placed.astype(np.int64) // 16).prod(axis=1)
        for budget in (16_384, 65_536):
            seconds = []
            for epoch in range(rounds):
                began = time.process_time()
                plan = plan_packs(tokens, budget, world_size=8, epoch=epoch)
                seconds.append(time.process_time() - began)
            rows.append(
                [
                    f"{n:,}", title, f"{budget:,}", f"{plan.tokens.size:,}", f"{plan.lower_bound:,}",
                    f"{plan.waste:.2%}", f"{plan.slack:,}", f"{statistics.median(seconds) * 1e3:.0f}",
                ]
            )  # fmt: skip
    return rows


def as_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    demo = read_sizes(list_images(REPO / "configs" / "demo_images")).sizes
    text = "\n\n".join(
        [
            "# Tokens",
            "Rules at 1024x1024, a token of 16x16 pixels; shapes around five common aspects. `tokens, spread` is the "
            "standard deviation of an image's tokens, as a share of their mean.",
            as_table(RULE_HEADER, by_rule(f"demo, {len(demo)}", demo) + by_rule("100,000", shapes(100_000))),
            "Packs for 8 ranks. No plan has fewer packs than all tokens divided by the budget.",
            as_table(PACK_HEADER, packs()),
            "Budget 16,384: what stays empty where each image goes into the first of so many open packs as it is "
            "loaded (next fit: one), and where all are planned.",
            as_table(["images", "sizes", "one open pack", "16", "256", "planned"], beside_loaders()),
            f"{os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}; commit {commit()}.",
        ]
    )
    (REPO / "benchmarks" / "results" / "tokens.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
