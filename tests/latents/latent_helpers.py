"""Small stores of random bits for the tests."""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.fingerprint import Fingerprint
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.writer import StoreWriter
from kohya_bucket.trainers.sdscripts.npz import check
from kohya_bucket.trainers.sdscripts.npz.read_write import BrokenNpzError, OpenNpz, read_note

SPACE = LatentSpace(0.13025)
PRINT = Fingerprint(100, 200, "", "vae", (64, 32), (70, 32), (3, 0), "area/cv2", "bfloat16")


def entry(source, **changes):
    return StoreEntry(source, replace(PRINT, **changes), (140, 64), (0.0, 1.5, 64.0, 30.5), f"caption of {source}")


def bits(seed, dtype="bfloat16", kind="latents", bucket=(64, 32)):
    shape = (4, bucket[1] // 8, bucket[0] // 8)
    shape = (2, *shape) if kind == "posterior" else shape
    size = carrier(dtype).itemsize
    random = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * size, dtype=np.uint8)
    # One bit of the exponent is never set: NaN and infinity have all of them.
    finite = random.view(f"<u{size}") & np.array((1 << 8 * size) - 1 - (1 << 8 * size - 2), f"<u{size}")
    return finite.view(carrier(dtype)).reshape(shape)


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
    """Equal bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def why_npz_bad(path, bucket, arch, *, original_size=None, flip=False, mask=False, content=False):
    """What keeps an npz from being used for a bucket, or None; with `content`, every byte's checksum counts, too."""

    def judge(file, keys):
        size = original_size or tuple(file.array(f"original_size{keys}").tolist()) if _there(file, keys) else (1, 1)
        parts = check._parts(arch, bucket, replace(PRINT, flip=flip, mask=mask))
        bad = check._why_unfit(file, keys, parts, size)
        bad = bad or (file.fault() if content else None)
        return [bad] if bad else []

    return next(iter(check._entry_in(path, bucket, arch, judge).reasons), None)


def _there(file, keys):
    return f"original_size{keys}" in file.names


def stored_fingerprint(path, bucket, arch):
    """What the latents of a bucket were made from, and the file name of the image; None where that is not known."""
    with suppress(FileNotFoundError, BrokenNpzError), OpenNpz(path) as file:
        keys = (keys for keys in arch.key_suffixes(bucket) if f"latents{keys}" in file.names)
        return next((read_note(file, k) for k in keys if file.shape(f"latents{k}") == arch.shape(bucket)), None)
    return None
