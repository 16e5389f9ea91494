"""Small stores of random bits for the tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kohya_bucket.latents.architectures import LatentSpace
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.fingerprint import Fingerprint
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.writer import StoreWriter

SPACE = LatentSpace(0.13025)
PRINT = Fingerprint(100, 200, "", "vae", (64, 32), (70, 32), (3, 0), "area/cv2", "bfloat16")


def entry(source, **changes):
    return StoreEntry(source, replace(PRINT, **changes), (140, 64), (0.0, 1.5, 64.0, 30.5), f"caption of {source}")


def bits(seed, dtype="bfloat16", kind="latents", bucket=(64, 32)):
    shape = (4, bucket[1] // 8, bucket[0] // 8)
    shape = (2, *shape) if kind == "posterior" else shape
    random = np.random.default_rng(seed)
    return random.integers(0, 256, int(np.prod(shape)) * carrier(dtype).itemsize, dtype=np.uint8).view(
        carrier(dtype)
    ).reshape(shape)  # fmt: skip


def fill(root, names, *, shard_bytes=1 << 20, **changes):
    """A store with one item per name; returns the bits by name."""
    out = {}
    with StoreWriter(root, shard_bytes=shard_bytes) as writer:
        for k, name in enumerate(names):
            made = entry(name, **changes)
            p = made.fingerprint
            out[name] = bits(k, p.dtype, p.kind, p.bucket_size)
            flipped = bits(1000 + k, p.dtype, p.kind, p.bucket_size) if p.flip else None
            writer.add(made, out[name], flipped=flipped, space=SPACE)
    return out


def same(a, b):
    """Equal bit for bit: random bits hold NaNs."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
