"""A whole loop with accelerate, on two processes, stopped in mid-epoch and resumed: every image once an epoch.

It needs accelerate. Run it as it is: it trains on two processes until it is stopped, starts again, and counts.
Or start it yourself, again and again with the same folder, on any number of processes:
    accelerate launch --num_processes 2 examples/accelerate_training.py FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from _sample_images import make_images
from accelerate import Accelerator
from torch import nn

from kohya_bucket import KohyaBuckets, bucketed_loader

EPOCHS = 2
STOP_AFTER = int(os.environ.get("STOP_AFTER", "0"))  # steps; 0: never


def train(folder: Path) -> None:
    """Train what is left to train of the images in `folder/images`; the place is kept in `folder/checkpoint`."""
    accelerator = Accelerator()
    loader = bucketed_loader(folder / "images", KohyaBuckets(128, 64, 256, 32), 2, accelerator=accelerator, seed=0)
    sampler = loader.bucket_sampler
    model = nn.Conv2d(3, 3, 3, padding=1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    accelerator.register_for_checkpointing(sampler)  # its place goes into each saved state
    checkpoint, rank = folder / "checkpoint", accelerator.process_index
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    steps = 0
    while sampler.epoch < EPOCHS:
        plan = sampler.plan()  # of the epoch, or of what is left of it
        for step, batch in enumerate(loader):
            loss = nn.functional.mse_loss(model(batch["image"]), batch["image"])
            accelerator.backward(loss * plan.loss_scale(step, rank))  # an image weighs the same on any rank
            optimizer.step()
            optimizer.zero_grad()
            with (folder / f"trained by {rank}.txt").open("a", encoding="utf-8") as trained:
                trained.writelines(f"{path}\n" for path in batch["path"])
            steps += 1
            if steps == STOP_AFTER:
                accelerator.save_state(str(checkpoint))
                accelerator.end_training()
                return
        if accelerator.is_main_process:
            print(plan.ledger())
    accelerator.end_training()


def stop_and_go_on(folder: Path) -> None:
    """Two starts of two processes each, of which the first stops in the middle of an epoch."""
    paths = make_images(folder / "images")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for stop_after in (13, 0):
        environment = {**os.environ, "STOP_AFTER": str(stop_after), "ACCELERATE_USE_CPU": "true"}
        subprocess.run([*command, __file__, str(folder)], env=environment, check=True)
    trained = Counter(line for file in folder.glob("trained by *.txt") for line in file.read_text("utf-8").splitlines())
    print(f"{len(paths)} images; trained {sorted(set(trained.values()))} times each in {EPOCHS} epochs and 2 starts")
    if set(trained.values()) != {EPOCHS} or len(trained) != len(paths):
        sys.exit("an image was missed or repeated")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as own:
            stop_and_go_on(Path(own))
