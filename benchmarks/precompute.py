"""Encoding a dataset: `kohya-bucket precompute --format npz` and sd-scripts' own `tools/cache_latents.py`.

    SD_SCRIPTS_DIR=… SD_MODEL=sd15.safetensors SD_TOKENIZERS=… PYTHON_OF_SD_SCRIPTS
        benchmarks/precompute.py [--images 24] [--stub-images 240] [--output FILE]

Both run as they are, each in a process of its own, one after the other in each round, in sd-scripts' environment, on
the same images with the same weights and batches. Measured is the time from the first image to the last file, without
loading the model. Two VAEs: the real one of SD 1.5, and a stub that takes 50 ms for a batch, as a fast GPU might: with
it, all that is left is what each program does around the VAE.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))
BATCHES: list[int] = []  # images in each call of a stub, in the process that encodes
SIZES = [(640, 480), (480, 640), (512, 512), (800, 450)]
CONFIG = """
[[datasets]]
resolution = 256
batch_size = 4
enable_bucket = true
min_bucket_reso = 128
max_bucket_reso = 512
bucket_reso_steps = 64
[[datasets.subsets]]
image_dir = {folder}
class_tokens = "x"
num_repeats = 1
"""


def make(folder: Path, count: int) -> Path:
    random = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    for k in range(count):
        width, height = SIZES[k % len(SIZES)]
        small = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
        picture = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        picture.save(folder / "images" / f"{k:04d}.jpg", quality=90)
    config = folder / "config.toml"
    config.write_text(CONFIG.format(folder=json.dumps(str(folder / "images"))), encoding="utf-8")
    return config


def stub_vae():
    import torch

    class Stub(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32

        def set_use_memory_efficient_attention_xformers(self, on):
            pass

        def encode(self, pixels):
            BATCHES.append(len(pixels))
            time.sleep(0.05)
            latents = torch.zeros((len(pixels), 4, pixels.shape[2] // 8, pixels.shape[3] // 8))
            return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: latents))

    return Stub()


def theirs(config: str, batch: int, stub: bool, highvram: bool) -> float:
    """In a process of its own: sd-scripts' tool; returns the seconds it caches for."""
    import runpy

    root = os.environ["SD_SCRIPTS_DIR"]
    os.chdir(root)
    sys.dont_write_bytecode = True
    sys.path.insert(0, root)
    from library import train_util

    took = []
    original = train_util.DatasetGroup.new_cache_latents

    def timed(self, *arguments):
        start = time.perf_counter()
        original(self, *arguments)
        took.append(time.perf_counter() - start)

    train_util.DatasetGroup.new_cache_latents = timed
    if stub:
        train_util.load_target_model = lambda *_: (None, stub_vae(), None, None)
    sys.argv = ["cache_latents.py", "--pretrained_model_name_or_path", os.environ["SD_MODEL"], "--tokenizer_cache_dir",
                os.environ["SD_TOKENIZERS"], "--dataset_config", config, "--vae_batch_size", str(batch),
                "--mixed_precision", "no", "--no_half_vae", *(["--highvram"] if highvram else [])]  # fmt: skip
    runpy.run_path(str(Path(root) / "tools" / "cache_latents.py"), run_name="__main__")
    return took[0]


def ours(config: str, batch: int, stub: bool, _: bool) -> float:
    """In a process of its own: the command; returns the seconds it encodes for."""
    import torch

    from kohya_bucket.cli import main
    from kohya_bucket.latents.encode import precompute
    from kohya_bucket.latents.vae import diffusers_vae

    class Encoder:
        downsample_factor, latent_channels, scale_factor, fingerprint = 8, 4, 0.18215, "stub"
        architecture, shift_factor = "sd", 0.0

        def posterior(self, pixels):
            BATCHES.append(len(pixels))
            time.sleep(0.05)
            mean = torch.zeros((len(pixels), 4, pixels.shape[2] // 8, pixels.shape[3] // 8))
            return mean, mean

        encode = posterior

    if stub:
        diffusers_vae.load_encoder = lambda *_, **__: Encoder()
    took = []
    original = precompute.encode_missing

    def timed(*arguments):
        start = time.perf_counter()
        original(*arguments)
        took.append(time.perf_counter() - start)

    precompute.encode_missing = timed
    sys.argv = ["kohya-bucket", "precompute", "--config", config, "--vae", os.environ["SD_MODEL"], "--arch", "sd",
                "--format", "npz", "--encode-batch-size", str(batch),
                "--dtype", "float32", "--device", "cpu"]  # fmt: skip
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    return took[0]


def run(side: str, config: Path, batch: int, stub: bool, highvram: bool) -> tuple[float, float]:
    """(images/s, images per call of the stub or 0) of one side, from nothing."""
    images = config.parent / "images"
    for path in images.glob("*.npz"):
        path.unlink()
    command = [sys.executable, str(HERE), "--side", side, "--config", str(config), "--batch", str(batch)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [*command, *(["--stub"] if stub else []), *(["--highvram"] if highvram else [])],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    seconds, per_call = map(float, done.stdout.strip().splitlines()[-1].split())
    count = len(list(images.glob("*.jpg")))
    assert len(list(images.glob("*.npz"))) == count
    return count / seconds, per_call


def main_() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--stub-images", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "precompute.md")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--highvram", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        seconds = {"theirs": theirs, "ours": ours}[options.side](
            options.config, options.batch, options.stub, options.highvram
        )  # fmt: skip
        print(f"\n{seconds} {statistics.mean(BATCHES) if BATCHES else 0}", flush=True)
        return
    lines = [
        "# Encoding a dataset (`benchmarks/precompute.py`)",
        "",
        "On the CPU, without a GPU: with the real VAE, nearly all time is its computation. Portrait, landscape and "
        "square images alternate. sd-scripts' tool sorts them only by the area of their bucket, so portrait and "
        "landscape images of one area alternate and split its batches. It also collects garbage after every batch, or "
        "with --highvram whenever the shape changes.",
        "",
        "| VAE | images | sd-scripts' tools/cache_latents.py, images/s | images per batch | kohya-bucket precompute, "
        "images/s | images per batch | ratio (rounds) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for k, (name, count, stub, highvram) in enumerate((
            ("SD 1.5, float32, 256 px, batches of 4", options.images, False, False),
            ("stub, 50 ms for a batch of 4", options.stub_images, True, False),
            ("stub, and sd-scripts with --highvram", options.stub_images, True, True),
        )):  # fmt: skip
            config = make(Path(folder) / f"data{k}", count)
            rounds = []
            for _ in range(options.rounds):
                settings = (config, options.batch, stub, highvram)
                rounds.append((run("theirs", *settings), run("ours", *settings)))
                print(name, rounds[-1], flush=True)
            ratios = sorted(b[0] / a[0] for a, b in rounds)
            cells = []
            for column in zip(*rounds, strict=True):
                rate, per_call = (statistics.median(numbers) for numbers in zip(*column, strict=True))
                cells += [f"{rate:.2f}", f"{per_call:.1f}" if per_call else "-"]
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
            lines.append(f"| {name} | {count} | {' | '.join(cells)} |")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    lines += [
        "",
        f"Medians of {options.rounds} rounds. {os.cpu_count()} cores, load average {load:.1f} at the end. Both in "
        "sd-scripts' environment. Files of precompute are synced to disk, those of sd-scripts are not.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main_()
