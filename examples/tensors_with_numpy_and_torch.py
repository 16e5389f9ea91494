"""Train on tensors of many shapes, each once an epoch, with numpy and torch alone: no Pillow, no data set class."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.functional import interpolate, mse_loss

from kohya_bucket import BucketBatchSampler, KohyaBuckets

torch.manual_seed(0)
sizes = np.random.default_rng(0).integers(96, 320, (50, 2))  # (width, height)
pictures = [torch.rand(3, height, width) for width, height in sizes.tolist()]

placement = KohyaBuckets(128, 64, 256, 32).place(sizes)
sampler = BucketBatchSampler(placement.bucket_index, batch_size=4, seed=0)


def in_its_bucket(i: int) -> torch.Tensor:
    """Picture `i`, resized and cropped as its placement says."""
    width, height = placement.resized_sizes[i].tolist()
    left, top, right, bottom = placement.cuts[i].tolist()
    resized = interpolate(pictures[i][None], (height, width), mode="bilinear", antialias=True)[0]
    return resized[:, top : height - bottom, left : width - right]


model = nn.Conv2d(3, 3, 3, padding=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    trained: list[int] = []
    for indices in sampler:
        batch = torch.stack([in_its_bucket(i) for i in indices])
        loss = mse_loss(model(batch + 0.3 * torch.randn_like(batch)), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained += indices
    assert sorted(trained) == list(range(len(pictures)))
    print(f"epoch {epoch}: {len(trained)} pictures once each in {len(sampler)} steps, loss {loss.item():.4f}")
