"""Planning an epoch and reading its batches, against other samplers in the same run.

    SD_SCRIPTS_DIR=... BUCKETSAMPLER_DIR=... NOVELAI_DIR=... python benchmarks/planning.py [--counts 10000,1000000]

Run it with a Python that has sd-scripts' requirements. A peer whose folder is not given is left out, and the table
says so. In each round every contestant plans one epoch and reads it to its end; the figures are medians over
rounds, the ratio is the median of the ratios within a round. Peak memory is how far the resident memory of a fresh
process rises while it plans (Linux only). Peers stop at the counts where they would take minutes or gigabytes.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import planning_resolutions  # noqa: E402

from kohya_bucket import KohyaBuckets  # noqa: E402
from kohya_bucket.planning import EpochPlanner  # noqa: E402

BATCH = 8
OURS, SD, NOVELAI, BS, TORCH = "kohya_bucket", "sd-scripts", "NovelAI", "bucketsampler", "torch, no buckets"
LIMIT = {OURS: 10**9, SD: 10**6, NOVELAI: 10**5, BS: 10**6, TORCH: 10**7}
Contestant = tuple[float, Callable[[int], Any], Callable[[Any], Iterable[Any]]]
"""(seconds to build what lasts, plan epoch e, read the planned batches)."""


def image_sizes(n: int) -> np.ndarray:
    """[n, 2] aspects scattered around 3:2, 2:3 and 1:1, about one megapixel."""
    rng = np.random.default_rng(0)
    aspect = rng.choice([1.5, 2 / 3, 1.0, 1.78], n) * np.exp(rng.normal(0, 0.15, n))
    return np.stack([1024 * np.sqrt(aspect), 1024 / np.sqrt(aspect)], axis=1).astype(np.int32)


def ours(sizes: np.ndarray) -> Contestant:
    ids = KohyaBuckets(1024).place(sizes).bucket_index
    began = time.perf_counter()
    EpochPlanner(ids, BATCH)
    built = time.perf_counter() - began
    return built, lambda epoch: EpochPlanner(ids, BATCH).plan(epoch=epoch), lambda plan: plan.rank_batches(0)


def sd_scripts(sizes: np.ndarray) -> Contestant:
    sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from library.train_util import BaseDataset, ImageInfo
    given = {"resolution": (1024, 1024), "network_multiplier": 1.0, "debug_dataset": False, "train_inpainting": False}
    data = BaseDataset(**{name: given[name] for name in given.keys() & inspect.signature(BaseDataset).parameters})
    data.enable_bucket, data.bucket_no_upscale, data.batch_size = True, False, BATCH
    data.min_bucket_reso, data.max_bucket_reso, data.bucket_reso_steps = 256, 2048, 64
    for i, size in enumerate(sizes.tolist()):
        info = ImageInfo(str(i), 1, "", False, str(i))
        info.image_size = tuple(size)
        data.image_data[str(i)] = info
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        data.make_buckets()
    built = time.perf_counter() - began

    def plan(epoch: int) -> Any:
        data.current_epoch = epoch
        data.shuffle_buckets()
        return data

    def read(data: Any) -> Iterable[list[str]]:
        for entry in data.buckets_indices:
            bucket = data.bucket_manager.buckets[entry.bucket_index]
            first = entry.batch_index * entry.bucket_batch_size
            yield bucket[first : first + entry.bucket_batch_size]

    return built, plan, read


def novelai(sizes: np.ndarray) -> Contestant:
    sys.path.insert(0, os.environ["NOVELAI_DIR"])
    from bucketmanager import BucketManager

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "resolutions.pkl"
        file.write_bytes(pickle.dumps({i: tuple(size) for i, size in enumerate(sizes.tolist())}))
        began = time.perf_counter()
        manager = BucketManager(str(file), bsz=BATCH)
        built = time.perf_counter() - began

    def plan(_: int) -> Any:
        manager.start_epoch()
        return manager

    return built, plan, lambda manager: manager.generator()


def bucketsampler(sizes: np.ndarray) -> Contestant:
    sys.path.insert(0, os.environ["BUCKETSAMPLER_DIR"])
    from bucketsampler.torch.sampler import BucketBatchSampler

    ids = KohyaBuckets(1024).place(sizes).bucket_index
    began = time.perf_counter()
    sampler = BucketBatchSampler(ids, BATCH, drop_last=False)
    built = time.perf_counter() - began

    def plan(epoch: int) -> Any:
        sampler.set_epoch(epoch)
        return iter(sampler)

    return built, plan, lambda batches: batches


def torch_samplers(sizes: np.ndarray) -> Contestant:
    from torch.utils.data import BatchSampler, RandomSampler

    began = time.perf_counter()
    sampler = BatchSampler(RandomSampler(sizes), BATCH, drop_last=False)
    built = time.perf_counter() - began
    # Its permutation is drawn when it is read, so all of its time is reading.
    return built, lambda _: sampler, lambda sampler: sampler


CONTESTANTS = {OURS: ours, SD: sd_scripts, NOVELAI: novelai, BS: bucketsampler, TORCH: torch_samplers}
NEEDS = {SD: "SD_SCRIPTS_DIR", NOVELAI: "NOVELAI_DIR", BS: "BUCKETSAMPLER_DIR"}


def present(name: str) -> bool:
    return name not in NEEDS or NEEDS[name] in os.environ


def timed(contestant: Contestant, epoch: int) -> tuple[float, float, int]:
    """(seconds to plan, seconds to read, batches)."""
    _, plan, read = contestant
    began = time.perf_counter()
    planned = plan(epoch)
    middle = time.perf_counter()
    count = 0
    for _ in read(planned):
        count += 1
    return middle - began, time.perf_counter() - middle, count


def child(name: str, n: int) -> float | None:
    """Rise of the high-water mark while one epoch is planned; for torch and NovelAI while it is read."""
    several = name.removeprefix("resolutions ") if name.startswith("resolutions ") else None
    if several is not None:
        ids = planning_resolutions.bucket_ids(image_sizes(n), several)
        planning_resolutions.timed(ids[:1000], several)
    else:
        contestant = CONTESTANTS[name](image_sizes(n))
        timed(CONTESTANTS[name](image_sizes(1000)), 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_mb("VmRSS")
        if several is not None:
            planning_resolutions.timed(ids, several)
            return _status_mb("VmHWM") - before
        planned = contestant[1](1)
        if name == TORCH:
            next(iter(contestant[2](planned)))
        return _status_mb("VmHWM") - before
    return None


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024 / 1e6


def measure(n: int, rounds: int) -> list[list[str]]:
    names = [name for name in CONTESTANTS if present(name) and n <= LIMIT[name]]
    contestants = {name: CONTESTANTS[name](image_sizes(n)) for name in names}
    times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names}
    for name in names:
        timed(contestants[name], 0)
    for epoch in range(1, rounds + 1):
        for name in names:
            times[name].append(timed(contestants[name], epoch))
    rows = []
    for name in names:
        plan = statistics.median(t[0] for t in times[name])
        batches = times[name][0][2]
        read = statistics.median(t[1] for t in times[name]) / batches
        whole = [sum(t[:2]) for t in times[name]]
        ratio = statistics.median(w / sum(t[:2]) for w, t in zip(whole, times[OURS], strict=True))
        command = [sys.executable, __file__, "--child", json.dumps([name, n])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        memory = json.loads(done.stdout.splitlines()[-1])
        rows.append(
            [
                f"{n:,}", name, f"{contestants[name][0] * 1e3:,.1f}", f"{plan * 1e3:,.1f}", f"{read * 1e6:,.2f}",
                f"{ratio:,.1f}", "-" if memory is None else f"{memory:,.0f}",
            ]
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="10000,100000,1000000,10000000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--resolutions", type=int, default=1_000_000, help="images of the table of several resolutions")
    parser.add_argument("--dry-run", action="store_true", help="print, and keep the results that there are")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(*json.loads(args.child))))
        return
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)
    lines = [
        ["images", "contestant", "build once, ms", "plan an epoch, ms", "read, us per batch", "time / ours", "peak MB"],
        ["---:", "---", *["---:"] * 5],
    ]
    for n in map(int, args.counts.split(",")):
        lines += measure(n, args.rounds if n <= 1_000_000 else 3)
    table = _as_table(lines)
    rows = planning_resolutions.measure(image_sizes(args.resolutions), args.rounds)
    several = _as_table([planning_resolutions.HEADER, ["---:", "---", *["---:"] * 4], *rows])
    missing = [f"{var} is not set: {name} is left out" for name, var in NEEDS.items() if var not in os.environ]
    note = (
        f"Batches of {BATCH} on one rank, Kohya's buckets at 1024x1024. Medians of rounds in which every contestant "
        "ran once; `time / ours` is for planning and reading one epoch together. Ours checks all arguments and makes "
        "the fingerprint again for every epoch; nothing is kept from the epoch before. sd-scripts: `make_buckets` "
        "once, "
        "`shuffle_buckets` per epoch, and the two look-ups of `__getitem__`. NovelAI: `start_epoch` and `generator` "
        "(quadratic, so up to 100,000). bucketsampler lists all batches when iteration starts. torch: RandomSampler "
        "with BatchSampler, without buckets; it draws its order while it is read. Peak memory while planning, "
        "above the input; 0 if it fits into memory that was already free."
        f" Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores."
    )
    more = (
        f"The same images at {', '.join(map(str, planning_resolutions.RESOLUTIONS))}, and at the largest alone: "
        "epochs of one length, as the adapter plans them. For that, the first plan counts the batches of every epoch "
        "until they repeat. Medians of rounds; peak memory of five epochs, above input."
    )
    text = "\n\n".join(["# Planning an epoch", table, note, *missing, "## Several resolutions", several, more]) + "\n"
    if not args.dry_run:
        (REPO / "benchmarks" / "results" / "planning.md").write_text(text, encoding="utf-8")
    print(text)


def _as_table(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


if __name__ == "__main__":
    main()
