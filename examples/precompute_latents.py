"""Encode the images once, then train on latents: the second run encodes nothing, an edited image is encoded again.

It uses a stand-in for a VAE, so nothing is downloaded. With a real one:

    from kohya_bucket.latents.vae.diffusers_vae import load_encoder
    encoder = load_encoder("stabilityai/sdxl-vae", dtype="bfloat16")
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from _sample_images import make_images
from torch.utils.data import DataLoader

from kohya_bucket import BucketBatchSampler, BucketedDataset, BucketedLatentDataset, KohyaBuckets, precompute_latents


class TinyEncoder:
    """All that `VAEEncoder` asks for: three numbers and one method."""

    downsample_factor = 8
    latent_channels = 4
    scale_factor = 0.5
    fingerprint = "tiny encoder, version 1"

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] in -1..1 -> [B, 4, H/8, W/8], scaled."""
        means = torch.nn.functional.avg_pool2d(pixels, self.downsample_factor)
        return torch.cat([means, means.mean(1, keepdim=True)], dim=1) * self.scale_factor


def main(folder: Path) -> None:
    paths = make_images(folder / "data")
    latents = folder / "latents"
    for run in (1, 2):
        dataset = BucketedDataset.from_folder(folder / "data", KohyaBuckets(128, 64, 256, 32))
        report = precompute_latents(dataset, TinyEncoder(), latents, batch_size=8, dtype="bfloat16")
        print(f"run {run}: {report.encoded} images encoded, {report.current} were there already")
        paths[0].write_bytes(paths[1].read_bytes())

    stored = BucketedLatentDataset(latents)
    loader = DataLoader(stored, batch_sampler=BucketBatchSampler(stored, batch_size=8))
    for step, batch in enumerate(loader):
        if step % 2 == 0:
            print(f"step {step}: latents {list(batch['latents'].shape)}, first caption {batch['caption'][0]!r}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        main(Path(folder))
