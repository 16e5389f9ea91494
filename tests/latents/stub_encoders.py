"""Encoders that need no model, and a dataset of generated images."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from kohya_bucket.buckets import KohyaBuckets

# its threads spin while they wait, and slow down everything else on a small machine
torch.set_num_threads(1)

SIZES = [(100, 60), (60, 100), (64, 64), (100, 62), (300, 200), (61, 103), (64, 64), (90, 80)]


class MeanEncoder:
    """Scaled latents only, like a user's own encoder: 8x8 means, with a fourth channel of their sum."""

    downsample_factor = 8
    latent_channels = 4
    scale_factor = 0.5
    fingerprint = "mean"

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.batches: list[int] = []

    def encode(self, pixels):
        self.batches.append(len(pixels))
        if self.seconds:
            time.sleep(self.seconds)
        mean = torch.nn.functional.avg_pool2d(pixels, 8)
        return torch.cat([mean, mean.sum(1, keepdim=True)], 1) * self.scale_factor


class PosteriorStub(MeanEncoder):
    """Gives mean and standard deviation as well."""

    shift_factor = 0.25
    fingerprint = "posterior"

    def posterior(self, pixels):
        mean = super().encode(pixels) / self.scale_factor
        return mean, mean.abs() * 0.1 + 0.01


@dataclass
class Images:
    """What `precompute_latents` asks of a dataset."""

    paths: list
    sizes: np.ndarray
    placement: object
    captions: list | None = None


def make_images(folder, sizes, alpha=False, seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    paths = []
    for k, (width, height) in enumerate(sizes):
        small = random.integers(0, 256, (6, 5, 4 if alpha else 3), dtype=np.uint8)
        path = folder / f"img_{k:03d}.png"
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(path, compress_level=1)
        paths.append(path)
    return paths


def dataset_of(paths, captions=None, area=(64, 64), **rule):
    sizes = np.array([Image.open(path).size for path in paths], dtype=np.int32).reshape(-1, 2)
    rule = KohyaBuckets(area, **({"min_size": 32, "max_size": 128, "reso_steps": 16} | rule))
    return Images(list(paths), sizes, rule.place(sizes), captions)
