"""How long ranks wait for each other: one shape per step against batches drawn by each rank on its own.

    python benchmarks/idle.py [--steps 40]

First the prediction, by pixels, for mixtures of sizes as they occur, 2 to 64 ranks: `independent` is how sd-scripts'
loader hands out batches, `same shape` is `plan_epoch`. Then two real processes (gloo, one thread each) train a small
convolutional net on random pixels of the planned sizes, both ways, and the waiting that was measured stands beside
the waiting that was predicted. Measured idle share: 1 - mean / largest of the ranks' own compute times, step by
step, the same formula that the prediction puts pixels into.
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

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from kohya_bucket import KohyaBuckets  # noqa: E402
from kohya_bucket.planning import (  # noqa: E402
    EpochPlan,
    idle_share,
    independent_costs,
    plan_epoch,
    rank_costs,
)

RANKS = (2, 4, 8, 16, 32, 64)
BATCH = 4


def mixtures(n: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> ([n] bucket ids, [K, 2] bucket sizes)."""
    rng = np.random.default_rng(0)
    aspect = rng.choice([2 / 3, 1.0, 1.5, 0.75, 1.78], n, p=[0.4, 0.25, 0.15, 0.1, 0.1]) * np.exp(rng.normal(0, 0.1, n))
    megapixels = np.exp(rng.normal(0, 0.9, n))
    sides = 1024 * np.sqrt(megapixels)[:, None] * np.stack([np.sqrt(aspect), 1 / np.sqrt(aspect)], axis=1)
    web = np.maximum(sides, 128).astype(np.int32)
    out = {}
    for name, rule in (
        ("Kohya 1024x1024", KohyaBuckets(1024)),
        ("Kohya 1024x1024, no upscale", KohyaBuckets(1024, no_upscale=True)),
    ):
        placement = rule.place(web)
        out[name] = (placement.bucket_index, placement.bucket_set.sizes)
    parts = [KohyaBuckets(side).place(web) for side in (512, 768, 1024)]
    firsts = np.cumsum([0, *(len(p.bucket_set) for p in parts)])
    which = rng.integers(0, 3, n)
    ids = np.choose(which, [p.bucket_index + first for p, first in zip(parts, firsts, strict=False)])
    out["a third each at 512, 768, 1024"] = (ids, np.concatenate([p.bucket_set.sizes for p in parts]))
    return out


def predicted() -> list[list[str]]:
    rows = []
    for name, (ids, sizes) in mixtures(20_000).items():
        for ranks in RANKS:
            plan = plan_epoch(ids, BATCH, world_size=ranks, bucket_sizes=sizes)
            costs = independent_costs(ids, BATCH, sizes, world_size=ranks), rank_costs(plan)
            ideal = float((sizes[:, 0].astype(float) * sizes[:, 1])[ids].sum()) / ranks
            rows.append(
                [
                    name,
                    str(ranks),
                    *(f"{idle_share(c):.1%}" for c in costs),
                    *(f"{c.max(axis=1).sum() / ideal:.2f}" for c in costs),
                    *(f"{len(c):,}" for c in costs),
                    f"{plan.ledger().repeated:,}",
                ]
            )
    return rows


def shapes(plan: EpochPlan, rank: int, sizes: np.ndarray, independent: bool, steps: int) -> list[tuple[int, int, int]]:
    """(images, width, height) of a rank's first steps."""
    if independent:
        mine = range(rank, steps * 2, 2)
        return [(int(plan.length[s]), *map(int, sizes[plan.bucket_of_step[s]])) for s in mine]
    lengths = plan.rank_lengths(rank)
    return [(int(lengths[s]), *map(int, sizes[plan.bucket_of_step[s]])) for s in range(steps)]


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
    model = torch.nn.parallel.DistributedDataParallel(net)
    ids, sizes = mixtures(2_000)["Kohya 1024x1024, no upscale"]
    result = {}
    for scheme, independent in (("independent", True), ("same shape", False)):
        plan = plan_epoch(ids, 2, world_size=1 if independent else 2, bucket_sizes=sizes)
        compute, whole = [], []
        for images, width, height in shapes(plan, rank, sizes, independent, steps):
            pixels = torch.randn(images, 4, height // 8, width // 8)
            dist.barrier()
            began = time.perf_counter()
            with model.no_sync():
                # Without communication: what this rank computes by itself.
                model(pixels).square().mean().backward()
            compute.append(time.perf_counter() - began)
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
            whole.append(time.perf_counter() - began)
            net.zero_grad()
        result[scheme] = (compute, whole)
    gathered: list = [None, None]
    dist.all_gather_object(gathered, result)
    if rank == 0:
        Path(file).write_text(json.dumps(gathered), encoding="utf-8")
    dist.barrier()
    # torch's gloo threads now and then abort a process that ends in good order.
    os._exit(0)


def measured(steps: int, rounds: int) -> list[list[str]]:
    ids, sizes = mixtures(2_000)["Kohya 1024x1024, no upscale"]
    shares: dict[str, list[float]] = {"independent": [], "same shape": []}
    seconds: dict[str, list[float]] = {"independent": [], "same shape": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "times.json")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
            subprocess.run(
                [*command, "--rank-file", file, "--steps", str(steps)],
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            both = json.loads(Path(file).read_text(encoding="utf-8"))
        for scheme in shares:
            shares[scheme].append(idle_share(np.array([rank[scheme][0] for rank in both]).T))
            seconds[scheme].append(sum(both[0][scheme][1]))
    rows, pixels = [], {}
    for scheme, independent in (("same shape", False), ("independent", True)):
        plan = plan_epoch(ids, 2, world_size=1 if independent else 2, bucket_sizes=sizes)
        cost = np.array(
            [[i * w * h for i, w, h in shapes(plan, rank, sizes, independent, steps)] for rank in range(2)], dtype=float
        ).T
        pixels[scheme] = cost.sum()
        pairs = zip(seconds[scheme], seconds["same shape"], strict=True)
        slower = statistics.median(own / same for own, same in pairs) * pixels["same shape"] / pixels[scheme]
        rows.append(
            [
                scheme,
                f"{idle_share(cost):.1%}",
                f"{statistics.median(shares[scheme]):.1%}",
                f"{min(shares[scheme]):.1%} to {max(shares[scheme]):.1%}",
                f"{slower:.2f}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_file:
        rank_main(args.rank_file, args.steps)
        return
    first = [
        [
            "mixture",
            "ranks",
            "idle, independent",
            "idle, same shape",
            "epoch, independent",
            "epoch, same shape",
            "steps, independent",
            "steps, same shape",
            "repeated, same shape",
        ],
        ["---", *["---:"] * 8],
        *predicted(),
    ]
    second = [
        ["two processes", "predicted", "measured (median)", "measured, rounds", "time per pixel, same shape = 1"],
        ["---", *["---:"] * 4],
        *measured(args.steps, args.rounds),
    ]
    tables = ["\n".join("| " + " | ".join(row) + " |" for row in rows) for rows in (first, second)]
    notes = [
        "The predicted share of all ranks' time that they spend waiting, counted in pixels. 20,000 images, 4 per rank "
        "and step; "
        "aspects around five common ones, megapixels log-normal around one (a third of the images below 0.7). "
        "`epoch` is the time of an epoch, where 1 is the time for all pixels divided by the number of ranks; it "
        "includes "
        "waiting, repeats and short batches. `repeated` counts images that are trained again so that no rank is empty.",
        f"Measured: {args.steps} steps, 2 images per rank, the no-upscale mixture, a net of three convolutions on a "
        "CPU, one thread per rank. The compute time of a step is measured before ranks wait for each other. If "
        "two ranks share a busy machine, their times differ even for equal work; the prediction does not include this "
        f"part. {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"numpy {np.__version__}.",
    ]
    text = "\n\n".join(["# Waiting ranks", notes[0], tables[0], "## Measured", tables[1], notes[1]]) + "\n"
    (REPO / "benchmarks" / "results" / "idle.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
