"""Encoding with a stub VAE of 50 ms a batch of 8: CPU time of an image, and how long the encoder waited."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from kohya_bucket import KohyaBuckets
from kohya_bucket.latents import precompute_latents


class Stub:
    downsample_factor, latent_channels, scale_factor, fingerprint = 8, 4, 1.0, "stub"
    device = torch.device("meta")  # like a GPU's: bytes go in, and nothing is computed on the processor

    def encode(self, pixels):
        time.sleep(0.05)
        return torch.zeros((len(pixels), 4, pixels.shape[2] // 8, pixels.shape[3] // 8))


@dataclass
class Data:
    paths: list
    sizes: np.ndarray
    placement: object


def encoding(paths, size, side, folder, switched, runs):
    """{name: (ms of CPU per image, share of time the encoder was idle, images/s)}; `switched` is {name: wrap}."""
    sizes = np.tile(np.array([size], dtype=np.int32), (len(paths), 1))
    data = Data(paths, sizes, KohyaBuckets(side, 256, 2048).place(sizes))
    options, found = {"dtype": "bfloat16", "batch_size": 8}, {name: [] for name in switched}
    for k in range(runs + 1):
        for n, (name, wrap) in enumerate(switched.items()):
            start = time.process_time()
            report = wrap(lambda k=k, n=n: precompute_latents(data, Stub(), folder / f"{n}-{k}", **options))()
            used = time.process_time() - start
            if k:  # the first warms up
                idle = 100 * report.device_idle / report.seconds
                found[name].append((1000 * used / len(paths), idle, len(paths) / report.seconds))
    return {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
