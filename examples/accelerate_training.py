"""One loader for any number of processes, with Hugging Face's accelerate: every image once per epoch.

It needs the extra `train`. Run it as it is, or on two processes:
    accelerate launch --num_processes 2 examples/accelerate_training.py
or without a GPU:
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 examples/accelerate_training.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from _sample_images import make_images
from accelerate import Accelerator
from torch import nn

from kohya_bucket import KohyaBuckets, bucketed_loader


def train(accelerator: Accelerator, folder: Path) -> None:
    loader = bucketed_loader(folder, KohyaBuckets(128, 64, 256, 32), 2, accelerator=accelerator, seed=0)
    sampler = loader.bucket_sampler
    model, optimizer = nn.Conv2d(3, 3, 3, padding=1), torch.optim.SGD
    model, optimizer = accelerator.prepare(model, optimizer(model.parameters(), lr=0.01))
    rank = accelerator.process_index
    for epoch in range(2):
        plan, trained = sampler.plan(), 0
        for step, batch in enumerate(loader):
            loss = nn.functional.mse_loss(model(batch["image"]), batch["image"]) * plan.loss_scale(step, rank)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            trained += len(batch["path"])
        print(f"epoch {epoch}, process {rank}: {trained} images in {plan.steps} steps; all together: {plan.ledger()}")


if __name__ == "__main__":
    accelerator = Accelerator()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        if accelerator.is_main_process:
            make_images(folder)
        shared = [str(folder)]
        if accelerator.num_processes > 1:
            torch.distributed.broadcast_object_list(shared)
        accelerator.wait_for_everyone()
        train(accelerator, Path(shared[0]))
        accelerator.wait_for_everyone()
