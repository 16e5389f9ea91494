"""What an epoch of sd-scripts' real datasets trains, without and with the adapter: missed, repeated, mixed shapes.

    SD_SCRIPTS_DIR=... python benchmarks/epochs.py

Run it with a Python that has sd-scripts' requirements. Images of random sizes go through the real dataset group,
collator and loader, and through accelerate for two processes (gloo, on this machine), as the trainers call them; there
is no model. A row says, over all its epochs, how few and how many images were missed and trained more often than asked
in an epoch, and in how many steps the processes had batches of different shapes. Nothing here depends on the speed of
the machine, but which images sd-scripts misses does depend on chance: so does the range.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

EPOCHS, BATCH, SEEDS = 3, 2, range(1, 11)
# images, processes, workers of each, whether --seed is given
CASES = [(41, 1, workers, True) for workers in (0, 1, 2, 8)] + [
    (203, 1, 8, True),
    (41, 2, 0, True),
    (41, 2, 2, True),
    (41, 2, 0, False),
    (41, 2, 2, False),
]


def one(folder: str, workers: int, seed: int, adapter: bool, out: str) -> None:
    """One process of a run: writes what each of its batches held."""
    sys.path[:0] = [os.environ["SD_SCRIPTS_DIR"], str(REPO / "compat_tests")]
    logging.disable(logging.WARNING)
    import torch

    if adapter:
        from kohya_bucket.trainers.sdscripts import install

        install(quiet=True)
    from accelerate import Accelerator
    from library import config_util, train_util
    from sdscripts_support import build_groups

    dataset = {"resolution": 128, "batch_size": BATCH, "enable_bucket": True, "min_bucket_reso": 64}
    subset = {"image_dir": folder, "caption_extension": ".txt"}
    config = {"datasets": [{**dataset, "max_bucket_reso": 512, "subsets": [subset]}]}
    rank = int(os.environ.get("RANK", "0"))
    # Without --seed every process draws its own, as the trainers do.
    sd = SimpleNamespace(train_util=train_util, config_util=config_util)
    group, _ = build_groups(sd, config, seed=seed if seed >= 0 else -seed * 1000 + rank)
    for dataset_ in group.datasets:
        dataset_.debug_dataset = True
    epoch, step = multiprocessing.Value("i", 0), multiprocessing.Value("i", 0)
    collator = train_util.collator_class(epoch, step, group if workers == 0 else None)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(
        torch.utils.data.DataLoader(group, batch_size=1, shuffle=True, collate_fn=collator, num_workers=workers)
    )
    rows = []
    for number in range(EPOCHS):
        epoch.value = number + 1
        for at, batch in enumerate(loader):
            keys = [Path(key).name for key in batch["image_keys"]]
            rows.append([number, at, list(batch["images"].shape[2:]), keys])
    Path(f"{out}.{rank}").write_text(json.dumps(rows), encoding="utf-8")
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        os._exit(0)  # torch's gloo threads now and then abort a process that ends in good order


def run(
    folder: Path, images: int, processes: int, workers: int, seed: int, adapter: bool
) -> list[tuple[int, int, int]]:
    """(missed, repeated, steps with differing shapes) of each epoch."""
    with tempfile.TemporaryDirectory() as temporary:
        out = str(Path(temporary, "rows"))
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command += [__file__, "--one", json.dumps([str(folder), workers, seed, adapter, out])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        rows = [row for rank in range(processes) for row in json.loads(Path(f"{out}.{rank}").read_text("utf-8"))]
    epochs = []
    for number in range(EPOCHS):
        counts: collections.Counter[str] = collections.Counter()
        shapes: dict[int, set[Any]] = collections.defaultdict(set)
        for _, step, shape, keys in (row for row in rows if row[0] == number):
            counts.update(keys)
            shapes[step].add(tuple(shape))
        repeated = sum(count - 1 for count in counts.values())
        epochs.append((images - len(counts), repeated, sum(len(s) > 1 for s in shapes.values())))
    return epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            one(*json.loads(options.one))
        return
    if "SD_SCRIPTS_DIR" not in os.environ:
        raise SystemExit("SD_SCRIPTS_DIR is not set: it names the sd-scripts checkout to run")
    sys.path.insert(0, str(REPO / "compat_tests"))
    from sdscripts_support import random_sizes, write_images

    print("# What an epoch trains\n")
    print("| images | processes | workers | --seed | | missed | repeated | steps of several shapes |")
    print("| ---: | ---: | ---: | --- | --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as temporary:
        for images, processes, workers, seeded in CASES:
            folder = Path(temporary, str(images))
            if not folder.exists():
                write_images(folder, random_sizes(images, 1, 60, 300))
            for adapter in (False, True):
                epochs = []
                for seed in SEEDS:
                    epochs += run(folder, images, processes, workers, seed if seeded else -seed, adapter)
                ranges = [
                    f"{min(x)}" if min(x) == max(x) else f"{min(x)} to {max(x)}" for x in zip(*epochs, strict=True)
                ]
                who = "kohya_bucket" if adapter else "sd-scripts"
                seed_text = "yes" if seeded else "no"
                print(
                    f"| {images} | {processes} | {workers} | {seed_text} | {who} | {' | '.join(ranges)} |", flush=True
                )
    print(
        f"\nThe smallest and largest number in an epoch, over {len(SEEDS)} runs of {EPOCHS} epochs. Batches of "
        f"{BATCH}; "
        "each image is asked for once. Shapes that the plan puts into one step cost about the same."
    )


if __name__ == "__main__":
    main()
