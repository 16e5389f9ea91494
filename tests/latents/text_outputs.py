"""Outputs as text encoders of some family give them, and a process that stores them."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.latents.items import Caption, Encoding
from kohya_bucket.latents.store.exact_arrays import pack
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter

Outputs = dict[str, Any]


def made_outputs(number: int, seed: int = 0) -> Outputs:
    """Of caption `number`: what came in bfloat16 as float32, padded, with a mask and whether that is applied."""
    rng = np.random.default_rng([number, seed])
    length = 3 + number % 9
    states = (rng.standard_normal((16, 64)).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    states[length:] = states[length] * (number % 2)
    return {
        "states": states,
        "pooled": rng.standard_normal(8).astype(np.float32),
        "mask": (np.arange(16) < length).astype(np.int64),
        "applied": np.array(True),
    }


def same_outputs(found: Outputs, want: Outputs) -> None:
    """The same names, types, shapes and bytes."""
    assert sorted(found) == sorted(want)
    for name, array in found.items():
        expected = np.asarray(want[name])
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        assert array.tobytes() == expected.tobytes(), name


def fill_texts(root: Path, count: int, *, seed: int = 0, shard_bytes: int = 1 << 30) -> dict[str, Outputs]:
    """Store the outputs of `count` captions; returns them by key."""
    want = {}
    with StoreWriter(root, shard_bytes=shard_bytes) as writer:
        for number in range(count):
            caption = Caption(f"caption {number}")
            want[caption.key] = made_outputs(number, seed)
            arrays = {name: pack(array) for name, array in want[caption.key].items()}
            writer.add_text(caption.entry("flux", Encoding("encoders", "tokens")), arrays)
    return want


def write_until_killed(root: Path, captions: int) -> None:
    """Store what is missing of `captions` captions, in small shards; each that is safe is told in a file."""
    there = set(LatentStore(root).strings("source")) if (root / "shards").is_dir() else set()
    (root / "ready").touch()
    written = []
    with StoreWriter(root, shard_bytes=5000) as writer:
        for number in range(captions):
            caption = Caption(f"caption {number}")
            if caption.key not in there:
                arrays = {name: pack(array) for name, array in made_outputs(number).items()}
                writer.add_text(caption.entry("flux", Encoding("encoders", "tokens")), arrays)
                written.append(caption.key)
                time.sleep(0.002)
            if len(written) == 5:
                writer.flush()
                with open(root / "told", "a", encoding="utf-8") as file:
                    file.write("".join(f"{key}\n" for key in written))
                written = []
