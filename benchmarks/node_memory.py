"""Memory of a node whose ranks share the columns of a data set, and where each rank has its own (Linux).

    python benchmarks/node_memory.py [--images 10000000] [--ranks 8]

Each rank is a process with torch, the data set (paths, captions, sizes, buckets; no file is opened) and the plan of an
epoch, of which it reads some steps. Memory is the sum of the ranks' proportional set sizes (Pss in
/proc/PID/smaps_rollup), in which a page that n processes share counts 1/n in each. What torch and Python take is
measured in as many processes that import the same, and have no data.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]


def pss(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("Pss:"))) * 1024


def rank(number: int, ranks: int, images: int, how: str, folder: Path) -> None:
    import torch.distributed as dist
    from dataset_memory import ours

    from kohya_bucket import BucketBatchSampler
    from kohya_bucket.datasets.shared import shared_on_node

    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=number, world_size=ranks)
    held = None
    if how != "torch alone":
        dataset = shared_on_node(lambda: ours(images)) if how == "shared" else ours(images)
        sampler = BucketBatchSampler(dataset, 4, num_replicas=ranks, rank=number)
        steps = iter(sampler)
        for _ in range(100):
            for i in next(steps):
                _ = dataset.source.name(i), dataset.source.caption(i), dataset.resized_sizes[i]
        held = dataset, sampler, steps
    dist.barrier()
    (folder / f"ready{number}").touch()
    while not (folder / "measured").exists():
        time.sleep(0.05)
    assert held is not None or how == "torch alone"
    os._exit(0)


def node(ranks: int, images: int, how: str) -> int:
    """Bytes of so many ranks together."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--rank-of", how, "--folder", name, "--images", str(images)]
        started = [subprocess.Popen([*command, "--ranks", str(ranks), "--number", str(r)]) for r in range(ranks)]
        while not all((folder / f"ready{r}").exists() for r in range(ranks)):
            if any(process.poll() is not None for process in started):
                raise SystemExit("a rank ended early")
            time.sleep(0.1)
        total = sum(pss(process.pid) for process in started)
        (folder / "measured").touch()
        for process in started:
            process.wait()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--dry-run", action="store_true", help="print, and keep the results that there are")
    for name, kind in (("--rank-of", str), ("--folder", Path), ("--number", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank(args.number, args.ranks, args.images, args.rank_of, args.folder)
    from origin import commit

    n, many = args.images, args.ranks
    alone, one = node(1, n, "torch alone"), node(1, n, "shared")
    counted = [
        ("one rank", 1, one, alone),
        ("columns shared", many, node(many, n, "shared"), node(many, n, "torch alone")),
    ]
    counted.append(("each its own columns", 2, node(2, n, "each its own"), node(2, n, "torch alone")))
    rows = [f"| {n:,} images | ranks | memory, MB | of it torch and Python, MB | data and plan, MB | of one rank's |"]
    rows.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, ranks, total, torch in counted:
        data = f"{(total - torch) / 1e6:,.0f} | {(total - torch) / (one - alone):.2f}"
        rows.append(f"| {name} | {ranks} | {total / 1e6:,.0f} | {torch / 1e6:,.0f} | {data} |")
    note = f"Python {platform.python_version()}, {os.cpu_count()} cores, commit {commit()}."
    said = " ".join(__doc__.split("\n\n")[2].split())
    text = "\n\n".join(["# Memory of a node", "\n".join(rows), f"{said} {note}"])
    if not args.dry_run:
        (REPO / "benchmarks" / "results" / "node_memory.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
