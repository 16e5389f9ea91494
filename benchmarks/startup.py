"""From start to the first batch of sd-scripts' real dataset code, without and with the adapter (Linux).

    SD_SCRIPTS_DIR=... python benchmarks/startup.py [--images 100000] [--workers 8] [--folder DIR]

Run it with a Python that has sd-scripts' requirements. Images with captions are written to DIR (default: a
temporary folder that is removed again), small JPEG files of 256 to 640 pixels, so that the files behind the
headers weigh little. Each contestant runs in processes of its own, the way a trainer does: the config is read, the
datasets are made, a loader with workers is built on the group, one batch is taken, then more. The page cache is warm
for all: files were just written, and the first process only reads them all once.

Memory is the proportional set size of the process and all its workers after the further batches; "records read by
one worker" is what a forked worker makes its own by looking up every image's record once, as an epoch does.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

PER_FOLDER = 10_000
BATCHES = 100


def write_images(folder: Path, count: int) -> None:
    """`count` JPEG files and captions in folders of 10,000; files that are there stay."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    files = []
    for _ in range(200):
        width, height = (int(side) for side in rng.integers(256, 641, 2))
        small = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8))
        out = io.BytesIO()
        small.resize((width, height), Image.Resampling.BICUBIC).save(out, "JPEG", quality=80)
        files.append(out.getvalue())
    for i in range(count):
        path = folder / f"part_{i // PER_FOLDER:03d}" / f"image_{i:07d}.jpg"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[i % len(files)])
        path.with_suffix(".txt").write_text(f"a photograph of a cat that sits on a fence, number {i}", encoding="utf-8")


def smaps(pid: int | str, field: str) -> float:
    """MB of one process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(field + ":"))) * 1024 / 1e6


def dirtied_by_reading(group: Any) -> float:
    """MB that a forked worker makes its own by reading every image's record once, batch by batch as an epoch does."""
    for dataset in group.datasets:
        _ = dataset.buckets_indices[0]
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        gc.freeze()
        before = smaps("self", "Private_Dirty")
        for dataset in group.datasets:
            for i in range(len(dataset.buckets_indices)):
                entry = dataset.buckets_indices[i]
                keys = dataset.bucket_manager.buckets[entry.bucket_index]
                start = entry.batch_index * entry.bucket_batch_size
                for key in keys[start : start + entry.bucket_batch_size]:
                    info, subset = dataset.image_data[key], dataset.image_to_subset[key]
                    _ = info.absolute_path, info.caption, info.bucket_reso, info.resized_size, subset.flip_aug
        os.write(send, str(smaps("self", "Private_Dirty") - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return float(os.read(receive, 64))


def one(folder: str, workers: int, adapter: bool) -> dict[str, float]:
    """In a fresh process."""
    sys.path[:0] = [os.environ["SD_SCRIPTS_DIR"], str(REPO / "compat_tests")]
    logging.disable(logging.INFO)
    started = time.perf_counter()
    import torch

    if adapter:
        from kohya_bucket.trainers.sdscripts import install

        install(quiet=True)
    from types import SimpleNamespace

    from library import config_util, train_util
    from sdscripts_support import build_groups

    imported = time.perf_counter()
    subsets = [{"image_dir": str(path), "caption_extension": ".txt"} for path in sorted(Path(folder).iterdir())]
    config = {
        "datasets": [
            {"resolution": 512, "batch_size": 4, "enable_bucket": True, "max_bucket_reso": 1024, "subsets": subsets}
        ]
    }
    group, _ = build_groups(SimpleNamespace(train_util=train_util, config_util=config_util), config)
    made = time.perf_counter()
    epoch, step = (multiprocessing.Value("i", 0) for _ in range(2))
    loader = torch.utils.data.DataLoader(
        group, batch_size=1, shuffle=True, collate_fn=train_util.collator_class(epoch, step, None),
        num_workers=workers, persistent_workers=True,
    )  # fmt: skip
    epoch.value = 1
    batches = iter(loader)
    next(batches)
    first = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    pids = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
    memory = sum(smaps(pid, "Pss") for pid in pids)
    own = statistics.mean(smaps(pid, "Private_Dirty") for pid in pids[1:])
    del batches, loader
    return {
        "imports": imported - started,
        "datasets": made - imported,
        "first batch": first - made,
        "total": first - started,
        "memory": memory,
        "own": own,
        "dirtied": dirtied_by_reading(group),
    }


def run(folder: Path, workers: int, adapter: bool, cache: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", json.dumps([str(folder), workers, adapter])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the images are, or are to be kept")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            result = one(*json.loads(options.one))
        print(json.dumps(result))
        return
    if "SD_SCRIPTS_DIR" not in os.environ:
        raise SystemExit("SD_SCRIPTS_DIR is not set: it names the sd-scripts checkout to start")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary, "images")
        write_images(folder, options.images)
        for path in folder.rglob("*.*"):
            path.read_bytes()
        runs: dict[str, list[dict[str, float]]] = {"sd-scripts": [], "adapter, first": [], "adapter, again": []}
        for number in range(options.rounds):
            cache = Path(temporary, f"cache{number}")
            runs["sd-scripts"].append(run(folder, options.workers, False, cache))
            runs["adapter, first"].append(run(folder, options.workers, True, cache))
            runs["adapter, again"].append(run(folder, options.workers, True, cache))
    names = ["imports", "datasets", "first batch", "total", "memory", "own", "dirtied"]
    print("# Start of a training run\n")
    print(
        "| start | imports, s | datasets, s | first batch, s | to the first batch, s | memory of all processes, MB "
        "| of it each worker's own, MB | dirtied by reading all records, MB |"
    )
    print("| --- |" + " ---: |" * len(names))
    for name, done in runs.items():
        cells = [statistics.median(result[key] for result in done) for key in names]
        print(f"| {name} | " + " | ".join(f"{x:.1f}" if x < 100 else f"{x:,.0f}" for x in cells) + " |")
    print(
        f"\n{options.images:,} images with captions, {options.workers} workers, medians of {options.rounds} rounds, "
        f"files in the page cache; memory after {BATCHES + 1} batches of 4; {os.cpu_count()} cores."
    )


if __name__ == "__main__":
    main()
