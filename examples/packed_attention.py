"""Images of any sizes in packs of at most 512 tokens, for a transformer whose images see only themselves.

The loss of a pack is that of its images alone, one after another, up to rounding.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from _sample_images import make_images
from torch.nn import functional

from kohya_bucket import BucketedDataset
from kohya_bucket.buckets.rules.token_band import TokenBandBuckets
from kohya_bucket.planning import plan_packs

PATCH, WIDTH, BUDGET = 16, 32, 512


class Tiny(torch.nn.Module):
    """One attention over patches of 16x16 pixels, of all images of a pack at once."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.out = torch.nn.Linear(WIDTH, 3 * PATCH * PATCH)

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        """Mean square error of each image, over all its tokens."""
        patches = [functional.unfold(image[None], PATCH, stride=PATCH)[0].T for image in images]
        x = torch.nested.as_nested_tensor([self.patches(part)[:, None] for part in patches], layout=torch.jagged)
        x = x.transpose(1, 2)  # [images, heads, tokens of each, width]
        seen = functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).values()[:, 0]
        error = (self.out(seen) - torch.cat(patches)).square().mean(dim=1)
        return torch.stack([part.mean() for part in error.split([len(part) for part in patches])])


def main(folder: Path) -> None:
    torch.manual_seed(0)
    dataset = BucketedDataset.from_paths(make_images(folder), TokenBandBuckets(128, min_size=64))
    tokens = (dataset.bucket_set.sizes[dataset.bucket_indices] // PATCH).prod(axis=1)
    plan, model = plan_packs(tokens, BUDGET), Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(plan.steps):
        images = [dataset[i]["image"] for i in plan.indices(step, rank=0).tolist()]
        losses = model(images)
        with torch.no_grad():
            alone = torch.cat([model([image]) for image in images])
        assert torch.allclose(losses, alone, atol=1e-5)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: {len(images)} images, {plan.tokens[step, 0]} of {BUDGET} tokens, loss {losses.mean():.3f}")
    print(f"{len(plan.items)} images in {plan.steps} packs, at least {plan.lower_bound}; {plan.waste:.1%} left empty")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
    with tempfile.TemporaryDirectory() as own:
        main(Path(own))
