"""What knowing the captions' tokens gains: idle time on 32 GPUs, in the form of KnapFormer's own simulation.

    python benchmarks/captions.py [--steps 400]

KnapFormer (arXiv 2508.06001) balances given streams: each GPU draws batches of one kind, and tokens move between GPUs
in every step. Its data codes, its caption lengths (0 to 392 tokens, all as likely) and its formula of cost
(24 L d^2 + 4 L^2 d for L tokens of width 3072) are used here, with five aspects from 0.96 to 1.04 in place of a draw.
`streams` is the time that GPUs wait without balancing; the others plan the same samples, move no token, and know the
whole set. What a plan is measured by is the true cost of its samples, whatever it was planned with.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

from local_order import table  # noqa: E402
from origin import commit  # noqa: E402

from kohya_bucket.planning import caption_bands, plan_epoch  # noqa: E402

WIDTH = 3072
COST = (24.0 * WIDTH**2, 4.0 * WIDTH)
ASPECTS = np.linspace(0.96, 1.04, 5)
CASES = {
    "images of 256": "g32b32i256f1s0",
    "images of 256 to 2048": "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "images and clips": "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,g1b10i256f4s0,g3b1i512f4s0,"
    "g8b2i256f85s1,g4b1i512f85s1",
}


def cost_of(tokens: np.ndarray) -> np.ndarray:
    return COST[0] * tokens + COST[1] * tokens.astype(np.float64) ** 2


def streams(codes: str, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(bucket, tokens, caption tokens) of each sample, and [steps, 32] costs of the GPUs' batches."""
    rng = np.random.RandomState(0)
    bucket, image, caption, costs = [], [], [], []
    for code in codes.split(","):
        gpus, batch, side, frames, smooth = map(int, re.findall(r"\d+", code))
        base = (side // 16) ** 2 * (max(int(frames / 3.4), 1) if smooth else frames)
        aspect = rng.randint(0, len(ASPECTS), (steps, gpus))
        text = rng.randint(0, 393, (steps, gpus, batch))
        tokens = np.broadcast_to((base * ASPECTS[aspect]).astype(np.int64)[..., None], text.shape)
        costs.append(cost_of(tokens + text).sum(axis=2))
        bucket.append(np.broadcast_to(aspect[..., None] + len(ASPECTS) * len(bucket), text.shape).reshape(-1))
        image.append(tokens.reshape(-1))
        caption.append(text.reshape(-1))
    return *(np.concatenate(part) for part in (bucket, image, caption)), np.concatenate(costs, axis=1)


def idle(costs: np.ndarray) -> float:
    return 1 - costs.sum() / (costs.max(axis=1).sum() * costs.shape[1])


def planned(bucket: np.ndarray, image: np.ndarray, caption: np.ndarray, bands: int, budget: float) -> tuple[float, int]:
    """(idle share, steps) of a plan on 32 GPUs."""
    of_bucket = np.zeros(int(bucket.max()) + 1, dtype=np.int64)
    of_bucket[bucket] = image
    found = caption_bands(bucket, caption, max(bands, 1))
    text = found.tokens if bands else np.zeros_like(found.tokens)
    plan = plan_epoch(
        found.bucket_ids, None, world_size=32, bucket_tokens=of_bucket[found.bucket] + text, token_cost=COST,
        max_cost=budget, seed=1,
    )  # fmt: skip
    true = cost_of(image + caption)
    costs = np.array([[true[plan.indices(s, r)].sum() for r in range(32)] for s in range(plan.steps)])
    return idle(costs), plan.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    rows = []
    for name, codes in CASES.items():
        bucket, image, caption, costs = streams(codes, options.steps)
        budget = float(costs.max())
        shares = [f"{planned(bucket, image, caption, bands, budget)[0]:.1%}" for bands in (0, 1, 4, 8)]
        rows.append([name, f"{idle(costs):.1%}", *shares])
    heads = ["samples", "streams", "a plan without captions", "with their mean", "with four bands", "with eight"]
    text = ["# Idle time with captions that cost", table(heads, rows)]
    text += [f"{options.steps} steps of the streams. " + " ".join(" ".join(__doc__.split("\n\n")[2:]).split())
             + f" Python {platform.python_version()}, numpy {np.__version__}; commit {commit()}."]  # fmt: skip
    out = REPO / "benchmarks" / "results" / "captions.md"
    out.write_text("\n\n".join(text) + "\n", encoding="utf-8", newline="\n")
    print("\n\n".join(text))


if __name__ == "__main__":
    main()
