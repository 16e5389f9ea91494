"""What an epoch on several GPUs loses to waiting and repeats: three ways of giving batches to ranks, predicted.

    python benchmarks/lost_time.py [--measure 60]

`shuffled` deals out the shuffled batches of one rank, as sd-scripts' loader does; `one shape` and `equal cost` are
`step_shapes="one"` and `"equal_cost"`. Sets: LoRA sets of 20 to 1,000 photos by pixels, one million at SDXL's sizes by
pixels, and clips by the operations of Wan 2.1 1.3B. Batches of clips are of one clip, of so many tokens, or by both
bounds of AdaptiveLoad (arXiv 2605.17923) as its abstract states them: tokens, and B·S^p. With `--measure`, two real
processes (gloo, one thread each) also train a small net on random pixels for so many steps, and their waiting stands
beside what was predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from origin import commit  # noqa: E402

from kohya_bucket import KohyaBuckets  # noqa: E402
from kohya_bucket.latents.token_grids import TOKEN_GRIDS  # noqa: E402
from kohya_bucket.planning import (  # noqa: E402
    EpochPlan,
    EpochPlanner,
    dealt_costs,
    idle_share,
    lost_share,
    lost_share_of,
    trained_cost,
)

WAN = TOKEN_GRIDS["wan-1.3b"]
FRAMES = np.array([1, 25, 45, 81])
TOKENS = 33_000
MEMORY = 4 * TOKENS  # of a larger GPU: four of the longest clips
HEADER = [
    "set", "buckets", "batch", "GPUs", "shuffled", "one shape", "equal cost", "steps of each", "repeats of the last two"
]  # fmt: skip
ROUNDS = 3


def photos(n: int, seed: int, **rule: Any) -> dict[str, Any]:
    """Photos of five common aspects and near them, from 0.2 to 6 megapixels, placed as for SDXL."""
    rng = np.random.default_rng(seed)
    aspect = rng.choice([2 / 3, 1.0, 1.5, 0.75, 1.78], n, p=[0.4, 0.25, 0.15, 0.1, 0.1]) * np.exp(rng.normal(0, 0.1, n))
    sides = 1024 * np.exp(rng.normal(0, 0.45, n))[:, None] * np.stack([np.sqrt(aspect), 1 / np.sqrt(aspect)], axis=1)
    placement = KohyaBuckets.for_arch("sdxl", **rule).place(np.maximum(sides, 128).astype(np.int32))
    used, ids = np.unique(placement.bucket_index, return_inverse=True)
    return {"bucket_ids": ids.reshape(-1), "bucket_sizes": placement.bucket_set.sizes[used]}


def clips(n: int, seed: int) -> dict[str, Any]:
    """Half images, half clips of 25, 45 or 81 frames; aspects near four common ones, placed at 832x480."""
    rng = np.random.default_rng(seed)
    aspect = rng.choice([16 / 9, 9 / 16, 4 / 3, 1.0], n, p=[0.45, 0.25, 0.15, 0.15]) * np.exp(rng.normal(0, 0.1, n))
    side = 640 * np.stack([np.sqrt(aspect), 1 / np.sqrt(aspect)], axis=1)
    placement = KohyaBuckets((832, 480), min_size=256, max_size=1280, reso_steps=32).place(side.astype(np.int32))
    used, size = np.unique(placement.bucket_index, return_inverse=True)
    frames = np.where(rng.random(n) < 0.5, 0, rng.integers(1, 4, n))
    tokens = WAN.tokens(np.repeat(placement.bucket_set.sizes[used], len(FRAMES), axis=0), np.tile(FRAMES, len(used)))
    ids = size.reshape(-1) * len(FRAMES) + frames
    return {"bucket_ids": ids, "bucket_tokens": tokens, "token_cost": WAN.token_cost}


def by_both_bounds(items: dict[str, Any]) -> dict[str, Any]:
    """Batch sizes B of AdaptiveLoad: B·S within memory, and B·S^p within what one of the longest clips takes.

    p is fitted to the operations, in which it is best: between 1 and 2, since attention is a part of them.
    """
    tokens = items["bucket_tokens"]
    p = np.polyfit(np.log(tokens), np.log(tokens + tokens**2 / (6 * WAN.width)), 1)[0]
    bounds = np.minimum(MEMORY // tokens, (tokens.max() / tokens) ** p)
    return {"batch_size": np.maximum(bounds, 1).astype(np.int64)}


def lost(items: dict[str, Any], ranks: int, **batch: Any) -> tuple[list[float], list[int], list[int]]:
    """(shares of the GPUs' time that are lost, steps, repeats): of the three ways, the last without the first."""
    alone = EpochPlanner(**items, **batch).plan()
    costs = dealt_costs(alone, ranks)
    plans = [EpochPlanner(**items, **batch, world_size=ranks, step_shapes=how).plan() for how in ("one", "equal_cost")]
    return (
        [lost_share(costs, trained_cost(alone)), *map(lost_share_of, plans)],
        [len(costs), *(plan.steps for plan in plans)],
        [plan.ledger().repeated for plan in plans],
    )


def row(name: str, make: Any, sets: int, ranks: int, shown: str, batch_of: Any) -> list[str]:
    """Medians over some sets of a kind; `batch_of` gives what bounds a set's batches."""
    made = [make(seed) for seed in range(sets)]
    found = [lost(items, ranks, **batch_of(items)) for items in made]
    buckets = statistics.median(len(np.unique(items["bucket_ids"])) for items in made)
    shares, steps, repeats = (
        [statistics.median(c) for c in zip(*column, strict=True)] for column in zip(*found, strict=True)
    )
    return [
        name, f"{buckets:.0f}", shown, f"{ranks}", *(f"{share:.1%}" for share in shares),
        "; ".join(f"{n:,.0f}" for n in steps), "; ".join(f"{n:,.0f}" for n in repeats),
    ]  # fmt: skip


def predicted() -> list[list[str]]:
    rows = [
        row(f"{n:,} photos", lambda seed, n=n: photos(n, seed), 9, ranks, "4", lambda _: {"batch_size": 4})
        for n in (20, 50, 100, 300, 1000)
        for ranks in (2, 4, 8)
    ]
    for ranks in (8, 64):
        for name, rule in (("", {}), (", no upscaling", {"no_upscale": True})):
            million = row(
                f"1,000,000 photos{name}",
                lambda seed, rule=rule: photos(10**6, seed, **rule),
                1,
                ranks,
                "4",
                lambda _: {"batch_size": 4},
            )
            rows.append(million)
    for n in (200, 2_000, 100_000):
        for shown, batch_of in (
            ("1", lambda _: {"batch_size": 1}),
            ("tokens", lambda _: {"max_tokens": TOKENS}),
            ("4·tokens", lambda _: {"max_tokens": MEMORY}),
            ("AdaptiveLoad", by_both_bounds),
        ):
            sets = 1 if n > 9_999 else 5
            rows.append(row(f"{n:,} clips, Wan", lambda seed, n=n: clips(n, seed), sets, 8, shown, batch_of))
    return rows


def shapes(plan: EpochPlan, rank: int, sizes: np.ndarray, steps: int) -> list[tuple[int, int, int]]:
    """(images, width, height) of a rank's first steps; batches of a plan for one are dealt out."""
    if plan.world_size == 1:
        return [(int(plan.length[s]), *map(int, sizes[plan.bucket(s, 0)])) for s in range(rank, steps * 2, 2)]
    lengths = plan.rank_lengths(rank)
    return [(int(lengths[s]), *map(int, sizes[plan.bucket(s, rank)])) for s in range(steps)]


def ways() -> tuple[dict[str, EpochPlan], np.ndarray]:
    """The plans that are measured."""
    items = photos(400, 0, no_upscale=True)
    plans = {
        name: EpochPlanner(**items, batch_size=2, world_size=ranks, step_shapes=how).plan()
        for name, ranks, how in (("shuffled", 1, "one"), ("one shape", 2, "one"), ("equal cost", 2, "equal_cost"))
    }
    return plans, items["bucket_sizes"]


def rank_main(file: str, steps: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    net = torch.nn.Sequential(
        torch.nn.Conv2d(4, 32, 3, padding=1), torch.nn.SiLU(), torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.SiLU(),
        torch.nn.Conv2d(32, 4, 3, padding=1),
    )  # fmt: skip
    plans, sizes = ways()
    result = {}
    for name, plan in plans.items():
        compute = []
        for images, width, height in shapes(plan, rank, sizes, steps):
            pixels = torch.randn(images, 4, height // 8, width // 8)
            dist.barrier()
            began = time.perf_counter()
            net(pixels).square().mean().backward()
            compute.append(time.perf_counter() - began)
            net.zero_grad()
        result[name] = compute
    gathered: list = [None, None]
    dist.all_gather_object(gathered, result)
    if rank == 0:
        Path(file).write_text(json.dumps(gathered), encoding="utf-8")
    dist.barrier()
    # torch's gloo threads now and then abort a process that ends in good order.
    os._exit(0)


def measured(steps: int) -> list[list[str]]:
    plans, sizes = ways()
    found: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "times.json")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, "--rank-file", file, "--measure", str(steps)], check=True, env=environment)
            both = json.loads(Path(file).read_text(encoding="utf-8"))
        for name in plans:
            found[name].append(idle_share(np.array([rank[name] for rank in both]).T))
    rows = []
    for name, plan in plans.items():
        cost = [[i * w * h for i, w, h in shapes(plan, rank, sizes, steps)] for rank in range(2)]
        predicted_share = idle_share(np.array(cost, dtype=float).T)
        spread = f"{min(found[name]):.1%} to {max(found[name]):.1%}"
        rows.append([name, f"{predicted_share:.1%}", f"{statistics.median(found[name]):.1%}", spread])
    return rows


def as_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, default=0, metavar="STEPS")
    parser.add_argument("--rank-file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_file:
        rank_main(args.rank_file, args.measure)
        return
    parts = [
        "# Time lost on several GPUs",
        "Predicted share of all GPUs' time that goes into waiting and repeats. Photos cost their pixels; of clips, L "
        f"tokens cost L + L² / {6 * WAN.width:,}, the operations of Wan 2.1 1.3B. `tokens` bounds a batch by "
        f"{TOKENS:,} tokens, `4·tokens` by {MEMORY:,}. `AdaptiveLoad` is our reading of its abstract (arXiv "
        f"2605.17923), on the same clips: B clips of S tokens with B·S up to {MEMORY:,}, and B·S^p up to that of one "
        "of the longest, with p fitted to the operations. Its batches are dealt out as `shuffled`; the two columns to "
        "the right plan the same batches. Medians of nine sets of up to 1,000 photos and five of up to 2,000 clips; "
        "one of the larger ones.",
        as_table(HEADER, predicted()),
        "Published, of other data on GPUs, so no comparison of equals: AdaptiveLoad (arXiv 2605.17923) brings the "
        "imbalance of Wan 2.1's training from 39 % to 18.9 %; "
        "KnapFormer (arXiv 2508.06001) reports less than 1 %, by moving tokens between GPUs in each step.",
    ]
    if args.measure:
        head = ["two processes", "idle, predicted", "measured, median", f"of {ROUNDS} rounds"]
        parts += [
            "## Measured",
            as_table(head, measured(args.measure)),
            f"{args.measure} steps, 400 photos without upscaling, 2 per rank, three convolutions on a CPU, one thread "
            "per rank. Two ranks that share a busy machine take different times for equal work; the prediction does "
            "not include that.",
        ]
    parts.append(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}; commit {commit()}."
    )
    text = "\n\n".join(parts) + "\n"
    (REPO / "benchmarks" / "results" / "lost_time.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
