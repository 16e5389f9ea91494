"""Buckets by tokens beside other rules.

    python benchmarks/tokens.py

Rules at 1024x1024 on the demo images of this repository and on 100,000 shapes: what is cropped off, buckets that hold
images, short batches of 4, spread of the tokens of an image, and what `remainder="merge"` saves of the buckets.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from origin import commit  # noqa: E402

from kohya_bucket import AutoBuckets, KohyaBuckets, NovelAIBuckets  # noqa: E402
from kohya_bucket.buckets.rules.token_band import TokenBandBuckets  # noqa: E402
from kohya_bucket.images import list_images, read_sizes  # noqa: E402
from kohya_bucket.planning import LedgerReason, plan_epoch  # noqa: E402

RULE_HEADER = [
    "images", "rule", "sizes in the set", "used", "cropped off, mean", "99th of 100", "tokens, spread", "short batches",
    "used after merge",
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
            f"{os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}; commit {commit()}.",
        ]
    )
    (REPO / "benchmarks" / "results" / "tokens.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
