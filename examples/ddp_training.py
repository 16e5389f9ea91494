"""Two processes, one plan: every image is trained exactly once, and weighs the same.

Run it as it is (it starts two processes on the CPU), or under torchrun:
    torchrun --nproc_per_node 2 examples/ddp_training.py
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _sample_images import make_images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from kohya_bucket import BucketBatchSampler, BucketedDataset, KohyaBuckets

WORLD_SIZE = 2
EPOCHS = 2


def train(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dataset = BucketedDataset.from_folder(folder, KohyaBuckets(128, 64, 256, 32))
    sampler = BucketBatchSampler(dataset, batch_size=2, num_replicas=world_size, rank=rank, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)
    model = DistributedDataParallel(nn.Conv2d(3, 3, 3, padding=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        plan = sampler.plan()
        for step, batch in enumerate(loader):
            images = batch["image"]
            loss = nn.functional.mse_loss(model(images), images) * plan.loss_scale(step, rank)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {len(loader)} steps on {world_size} ranks")
    if rank == 0:
        print(f"{len(dataset)} images; {sampler.ledger()}")


def child(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    train(rank, WORLD_SIZE, folder)
    leave()


def leave() -> None:
    """End this process at once: gloo's threads now and then abort one that is taken down in good order."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if "RANK" in os.environ:
        # Under torchrun: the first rank makes the images for all.
        dist.init_process_group("gloo")
        shared = Path(tempfile.gettempdir()) / f"kohya_bucket_ddp_{os.environ['MASTER_PORT']}"
        if dist.get_rank() == 0:
            make_images(shared)
        dist.barrier()
        train(dist.get_rank(), dist.get_world_size(), str(shared))
        leave()
    else:
        with tempfile.TemporaryDirectory() as folder:
            make_images(Path(folder))
            mp.spawn(child, args=(free_port(), folder), nprocs=WORLD_SIZE)
