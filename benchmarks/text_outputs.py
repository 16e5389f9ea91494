"""Text-encoder outputs in sd-scripts' npz and in shards: bytes, and warm reads, side by side.

    python benchmarks/text_outputs.py [--captions 32] [--runs 5] [--output FILE]

Random numbers in the shapes that sd-scripts' FLUX and SDXL strategies hand to `np.savez`: bfloat16 cast to float32.
FLUX's T5 gives 512 positions. Without the mask all of them differ. With it, 168 differ for a caption of 77 tokens: T5
gives one row for all positions that are 91 or more behind the caption (its relative positions go no further). A read
is what a strategy's `load_outputs_npz` returns, in random order from the page cache, in milliseconds of CPU, to which
other programs on the machine add little; the first read of a caption in a process also maps its shard and compares
its checksum.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from origin import commit

from kohya_bucket.latents.items import Caption, Encoding
from kohya_bucket.latents.store.exact_arrays import pack
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter

TOKENS, REACH = 77, 91


def halves(rng, *shape):
    values = rng.standard_normal(shape, dtype=np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def flux(rng, kind):
    t5 = halves(rng, 512, 4096)
    if kind != "plain":
        t5[TOKENS + REACH :] = t5[TOKENS + REACH]
    mask = (np.arange(512) < TOKENS).astype(np.int64)
    return {"l_pooled": halves(rng, 768), "t5_out": t5, "txt_ids": np.zeros((512, 3), np.float32),
            "t5_attn_mask": mask, "apply_t5_attn_mask": np.array(kind != "plain")}  # fmt: skip


def sdxl(rng, _):
    return {"hidden_state1": halves(rng, 77, 768), "hidden_state2": halves(rng, 77, 1280), "pool2": halves(rng, 1280)}


CASES = {
    "FLUX, no mask": (flux, "plain"),
    "FLUX, mask, 77 tokens": (flux, "masked"),
    "SDXL": (sdxl, ""),
}


def measured(make, kind, captions, runs, folder):
    """Bytes per caption in npz and shards, and medians of ms per read: npz, a first read, later reads."""
    rng, names = np.random.default_rng(0), [f"{n}" for n in range(captions)]
    with StoreWriter(folder / "text") as writer:
        for name in names:
            arrays = make(rng, kind)
            np.savez(folder / f"{name}.npz", **arrays)
            writer.add_text(Caption(name).entry("", Encoding()), {key: pack(array) for key, array in arrays.items()})
    order, keys = names * 2, list(arrays)
    random.Random(0).shuffle(order)
    times: dict[str, list[float]] = {"npz": [], "first": [], "later": []}

    def read_npz(name):
        data = np.load(folder / f"{name}.npz")
        return [data[key] for key in keys]

    def timed(kind_of_read, read, *what):
        start = time.thread_time()
        read(*what)
        times[kind_of_read].append((time.thread_time() - start) * 1000)

    for _ in range(runs):
        store = LatentStore(folder / "text")
        at = dict(zip(names, store.find([Caption(name).key for name in names]).tolist(), strict=True))
        for name in names:
            timed("first", store.arrays, at[name])
        for name in order:
            timed("npz", read_npz, name)
        for name in order:
            timed("later", store.arrays, at[name])
    for name in names:
        found, want = store.arrays(at[name]), dict(np.load(folder / f"{name}.npz"))
        assert all(found[key].tobytes() == want[key].tobytes() for key in keys)
    sizes = [sum(path.stat().st_size for path in where) / captions
             for where in (folder.glob("*.npz"), (folder / "text" / "shards").iterdir())]  # fmt: skip
    return sizes, {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--captions", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "text_outputs.md")
    options = parser.parse_args()
    lines = [
        "| outputs of a caption | npz, kB | shards, kB | share | npz, ms | shards, first read, ms | later reads, ms |"
        " npz / first | npz / later |",
        "| --- " + "| ---: " * 8 + "|",
    ]
    for name, (make, kind) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            (npz, shards), ms = measured(make, kind, options.captions, options.runs, Path(folder))
        lines.append(
            f"| {name} | {npz / 1e3:,.0f} | {shards / 1e3:,.0f} | {shards / npz:.1%} | {ms['npz']:.2f} | "
            f"{ms['first']:.2f} | {ms['later']:.2f} | {ms['npz'] / ms['first']:.1f} | {ms['npz'] / ms['later']:.1f} |"
        )
    lines += ["", f"{options.captions} captions, {options.runs} runs; medians of single reads, ms of CPU; "
              f"{os.cpu_count()} cores; commit {commit()}. All arrays equal those of npz to the last bit."]  # fmt: skip
    text = "\n".join(lines) + "\n"
    print(text)
    options.output.write_text(f"# Text-encoder outputs (`benchmarks/text_outputs.py`)\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
