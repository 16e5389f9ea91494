"""CPU time for one image: datasets side by side with bucketsampler, and decoders.

    python benchmarks/pixels.py [--images 6] [--runs 7] [--bucketsampler DIR] [--output FILE]

Pictures are made here: noise of every scale, as photos have it, with hard edges on top; JPEG of quality 90, 4:2:0. All
figures are CPU time of the whole process (threads of libraries included), medians over images and runs, contestants in
turn. bucketsampler resizes with Pillow's bicubic filter, which smooths when it shrinks, as the area filter does.
Decoders that are not installed are left out and named.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from origin import commit
from PIL import Image, ImageDraw, features
from pixel_decoders import decoders
from pixel_encoding import encoding

from kohya_bucket import BucketedDataset, KohyaBuckets
from kohya_bucket.images import pixels as pixels_module

CASES = {"3.8 MP to 512": ((2250, 1688), 512), "1280 px to 1024": ((1280, 1280), 1024),
         "4 MP to 1024": ((2310, 1732), 1024)}  # fmt: skip


def picture(size, seed):
    width, height = size
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3), np.float32)
    for octave in range(1, 11):
        side = 2**octave
        small = rng.normal(size=(height // side + 2, width // side + 2, 3)).astype(np.float32)
        small = (0.5 * small + small.mean(axis=2, keepdims=True)) * side**0.8
        for channel in range(3):
            layer = Image.fromarray(small[:, :, channel]).resize(size, Image.Resampling.BICUBIC)
            total[:, :, channel] += np.asarray(layer)
    total = (total - total.mean()) / total.std() * 50 + 120
    image = Image.fromarray(np.clip(total, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y, w, h = rng.integers(0, width), rng.integers(0, height), *rng.integers(8, height // 6, 2)
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((x, y, x + w, y + h), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return image


def in_turn(contestants, runs):
    """{name: median ms of CPU} of {name: [calls]}."""
    times = {name: [] for name in contestants}
    for calls in contestants.values():
        calls[0]()
    for _ in range(runs):
        for k in range(len(next(iter(contestants.values())))):
            for name, calls in contestants.items():
                start = time.process_time()
                calls[k]()
                times[name].append((time.process_time() - start) * 1000)
    return {name: statistics.median(found) for name, found in times.items()}


def without_simplejpeg(work):
    def run():
        with mock.patch.object(pixels_module, "_simplejpeg", return_value=None):
            return work()

    return run


SWITCHED = {"simplejpeg": lambda work: work, "Pillow": without_simplejpeg}


def items(folder, options):
    """Rows of datasets' items."""
    rows = []
    for case, (size, side) in CASES.items():
        paths = [folder / f"{case}-{k}.jpg" for k in range(options.images)]
        for k, path in enumerate(paths):
            picture(size, k).save(path, quality=90)
        rule = KohyaBuckets(side, 256, 2048)
        ours = BucketedDataset(paths, rule)
        contestants = {}
        if options.bucketsampler:
            peer = importlib.import_module("bucketsampler")
            module = importlib.import_module("bucketsampler.torch")
            height, width = ours[0]["image"].shape[1:]
            theirs = module.BucketedDataset(paths, peer.FixedBuckets(peer.BucketSet.from_dims([(width, height)])))
            assert theirs[0]["image"].shape == ours[0]["image"].shape
            contestants["bucketsampler"] = [lambda k=k, d=theirs: d[k] for k in range(len(paths))]
        for name, wrap in SWITCHED.items():
            contestants[f"ours, {name}"] = [wrap(lambda k=k, d=ours: d[k]) for k in range(len(paths))]
        found = in_turn(contestants, options.runs)
        base = found.get("bucketsampler")
        rows += [(case, name, ms, ms / base if base else None) for name, ms in found.items()]
    return rows


def encode(folder, options):
    """What `encoding` measures of 48 different files."""
    paths = [folder / f"encoded-{k}.jpg" for k in range(48)]
    for k, path in enumerate(paths):
        if k < 4:
            picture((1280, 1280), k).save(path, quality=90)
        else:
            shutil.copyfile(paths[k % 4], path)
    return encoding(paths, (1280, 1280), 1024, folder, SWITCHED, options.runs)


def files(options):
    """{case: (encoded pictures, the size that they are resized to)}."""
    found = {}
    for case, (size, side) in CASES.items():
        data = [io.BytesIO() for _ in range(options.images)]
        for k, file in enumerate(data):
            picture(size, k).save(file, "JPEG", quality=90)
        to = tuple(KohyaBuckets(side, 256, 2048).place([size]).resized_sizes[0].tolist())
        found[case] = [file.getvalue() for file in data], to
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--bucketsampler", type=Path, default=os.environ.get("BUCKETSAMPLER_DIR"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "pixels.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.bucketsampler:
        sys.path.insert(0, str(options.bucketsampler))
    with tempfile.TemporaryDirectory() as folder:
        rows = items(Path(folder), options)
        waits = encode(Path(folder), options)
    lines = ["| JPEG | an item of | ms of CPU | / bucketsampler |", "| --- | --- | ---: | ---: |"]
    lines += [f"| {case} | {name} | {ms:.1f} | {'-' if ratio is None else f'{ratio:.2f}'} |"
              for case, name, ms, ratio in rows]  # fmt: skip
    lines += ["", "| encoding, stub VAE of 50 ms for 8, 1280 px to 1024 | ms of CPU per image | idle | images/s |",
              "| --- | ---: | ---: | ---: |"]  # fmt: skip
    lines += [f"| {name} | {ms:.1f} | {idle:.0f} % | {rate:.0f} |" for name, (ms, idle, rate) in waits.items()]
    found, missing = decoders(files(options), in_turn, options.runs)
    lines += ["", "| decoding | " + " | ".join(f"{case}, ms of CPU | / Pillow | pixels" for case in found) + " |",
              "| --- |" + " ---: | ---: | --- |" * len(found)]  # fmt: skip
    for name in next(iter(found.values())):
        cells = [f"{ms:.1f} | {ratio:.2f} | {equal}" for ms, ratio, equal in (case[name] for case in found.values())]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if missing:
        lines += ["", f"Not measured: {'; '.join(missing)}."]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    turbo = features.version("libjpeg_turbo")
    lines += ["", f"{options.images} images, {options.runs} runs; {os.cpu_count()} cores, load average {load:.1f} at "
              f"the end; Pillow {Image.__version__} with libjpeg-turbo {turbo}; commit {commit()}."]  # fmt: skip
    text = "\n".join(lines) + "\n"
    print(text)
    options.output.write_text(f"# Pixels of an item (`benchmarks/pixels.py`)\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
