"""Order "local": how often shards are downloaded, how well it mixes, and how long a plan takes.

    python benchmarks/local_order.py [--images 10000000] [--shard 1000] [--rounds 3]

A node keeps the `open_shards` shards that it used last, and downloads a shard that it has not got: counted for each
node of an epoch's plan, step by step. Mixing is the distance in the source (the order in which the images were listed)
between an image and the next one of the same batch; a full shuffle has 1. Plans are timed in turn, in one process.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from origin import commit  # noqa: E402
from planning import image_sizes  # noqa: E402

from kohya_bucket import KohyaBuckets  # noqa: E402
from kohya_bucket.planning import EpochPlan, EpochPlanner  # noqa: E402

RANKS, BATCH = 64, 4


def store_shards(ids: np.ndarray, per_shard: int) -> np.ndarray:
    """[N] shards of one bucket each, as a store has them: images in the order of their names."""
    order = np.argsort(ids, kind="stable")
    counts = np.bincount(ids)
    turn = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    before = np.cumsum(-(-counts // per_shard)) - -(-counts // per_shard)
    shards = np.empty(len(ids), dtype=np.int32)
    shards[order] = before[ids[order]] + turn // per_shard
    return shards


def downloads(plan: EpochPlan, shards: np.ndarray, nodes: int, room: int) -> float:
    """Downloads of one epoch for each shard and node."""
    total, ranks = 0, plan.world_size // nodes
    for node in {0, nodes // 2, nodes - 1}:
        kept: OrderedDict[int, None] = OrderedDict()
        for step in range(plan.steps):
            begin, n = int(plan.start[step]), int(plan.length[step])
            first, last = n * node * ranks // plan.world_size, n * (node + 1) * ranks // plan.world_size
            for shard in set(shards[plan.items[begin + first : begin + last]].tolist()):
                if shard in kept:
                    kept.move_to_end(shard)
                    continue
                total += 1
                kept[shard] = None
                if len(kept) > room:
                    kept.popitem(last=False)
    return total / len({0, nodes // 2, nodes - 1}) / (int(shards.max()) + 1)


def mixing(plan: EpochPlan) -> float:
    """Mean distance in the source between neighbours in a batch, a full shuffle's being 1."""
    batch = np.repeat(np.arange(plan.steps), plan.length)
    at = np.repeat(plan.start - np.cumsum(plan.length) + plan.length, plan.length) + np.arange(len(batch))
    items = plan.items[at].astype(np.int64)
    near = np.abs(np.diff(items))[batch[1:] == batch[:-1]]
    return float(near.mean()) / (plan.images / 3)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def reading(ids: np.ndarray, per_shard: int) -> str:
    lay = {
        "one bucket (store)": store_shards(ids, per_shard),
        "all buckets (tar)": (np.arange(len(ids)) // per_shard).astype(np.int32),
    }
    rows = []
    for name, shards in lay.items():
        for order, room, asked, nodes in (
            ("shuffled", 64, 1, 1), ("local", 64, 1, 1), ("local", 256, 1, 1),
            ("local", 64, 1, 8), ("local", 64, 8, 8), ("local", 256, 8, 8),
        ):  # fmt: skip
            options = {} if order == "shuffled" else {"shards": shards, "open_shards": room, "nodes": asked}
            plan = EpochPlanner(ids, BATCH, world_size=RANKS, order=order, **options).plan(epoch=1)
            read = downloads(plan, shards, nodes, room)
            rows.append([name, order, str(room), str(asked), str(nodes), f"{read:,.2f}", f"{mixing(plan):.2f}"])
    header = ["shards of", "order", "open_shards", "nodes=", "nodes", "downloads of a shard by a node", "mixing"]
    return table(header, rows)


def planning(ids: np.ndarray, per_shard: int, rounds: int) -> str:
    one, tars = store_shards(ids, per_shard), (np.arange(len(ids)) // per_shard).astype(np.int32)
    ways = {
        "shuffled": {},
        "local, shards of one bucket": {"order": "local", "shards": one},
        "local, shards of all buckets": {"order": "local", "shards": tars},
        "local, shards of one bucket, nodes=8": {"order": "local", "shards": one, "nodes": 8},
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for epoch in range(rounds + 1):
        for name, options in ways.items():
            began = time.process_time()
            EpochPlanner(ids, BATCH, world_size=RANKS, **options).plan(epoch=epoch)
            times[name].append(time.process_time() - began)
    rows = []
    for name in ways:
        ratio = statistics.median(a / b for a, b in zip(times[name][1:], times["shuffled"][1:], strict=True))
        rows.append([name, f"{statistics.median(times[name][1:]):.2f}", f"{ratio:.2f}"])
    return table([f"order, {len(ids):,} images", "plan an epoch, s of CPU", "time / shuffled"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000_000)
    parser.add_argument("--read-images", type=int, default=2_000_000, help="images of the table of downloads")
    parser.add_argument("--shard", type=int, default=1000, help="images of one shard")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="print, and keep the results that there are")
    args = parser.parse_args()
    ids = KohyaBuckets(1024).place(image_sizes(args.images)).bucket_index
    parts = ["# An order that reads each shard once", planning(ids, args.shard, args.rounds)]
    ids = ids[: args.read_images]
    parts.append(reading(ids, args.shard))
    said = " ".join(__doc__.split("\n\n")[2].split())
    parts.append(
        f"Downloads of {len(ids):,} images in {len(np.unique(ids))} buckets, {args.shard:,} images to a shard, "
        f"{RANKS} ranks with batches of {BATCH}. {said} Medians of {args.rounds} rounds. "
        f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores; "
        f"commit {commit()}."
    )
    text = "\n\n".join(parts) + "\n"
    if not args.dry_run:
        (REPO / "benchmarks" / "results" / "local_order.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
