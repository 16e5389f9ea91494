"""A whole training loop: images of many shapes, batches of one shape each, every image once per epoch.

Run it as it is (it makes its own images), or on yours: python examples/minimal_training_loop.py FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from _sample_images import make_images
from torch import nn
from torch.utils.data import DataLoader

from kohya_bucket import BucketBatchSampler, BucketedDataset, KohyaBuckets

EPOCHS = 2


def main(folder: Path) -> None:
    torch.manual_seed(0)
    # The buckets of sd-scripts at 128x128; for SDXL this would be KohyaBuckets.for_arch("sdxl").
    dataset = BucketedDataset.from_folder(folder, KohyaBuckets(128, 64, 256, 32))
    sampler = BucketBatchSampler(dataset, batch_size=4, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)
    print(f"{len(dataset)} images in {len(dataset.bucket_set)} buckets, {len(sampler)} steps per epoch")

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen: Counter[str] = Counter()
        for step, batch in enumerate(loader):
            images = batch["image"]
            noisy = images + 0.3 * torch.randn_like(images)
            loss = nn.functional.mse_loss(model(noisy), images)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.update(batch["path"])
            if step % 4 == 0:
                print(f"epoch {epoch} step {step:2d}  {batch['bucket'][0]!s:>8} x{len(images)}  loss {loss.item():.4f}")
        assert set(seen.values()) == {1}
        assert len(seen) == len(dataset)
        print(f"epoch {epoch}: every image was trained exactly once")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            make_images(Path(folder))
            main(Path(folder))
