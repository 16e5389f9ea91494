"""How long images wait for latents: sd-scripts alone, behind the launcher, `precompute`, and nothing but the VAE.

    SD_SCRIPTS_DIR=… PYTHON_OF_SD_SCRIPTS benchmarks/caching.py [--images 300] [--rounds 3] [--output FILE]

The real `train_network.py --cache_latents --cache_latents_to_disk` caches, with the tiny random models of
`compat_tests/small_models`, and is ended where its caches are made. Each in a process of its own, one after the other
in each round, on the same images. The VAE alone gets the same buckets and batches as random pixels.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "compat_tests")]

from precompute import make  # noqa: E402

SIDES = ("alone", "launched", "precompute", "vae")


def vae_in(folder: Path):
    """That of `compat_tests/small_models`."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8] * 4, norm_num_groups=2, latent_channels=4,
    )  # fmt: skip
    if not folder.exists():
        vae.save_pretrained(folder)
    return vae.requires_grad_(False)


def trainer(config: Path, *, launched: bool) -> float:
    """Seconds that sd-scripts' own trainer caches for."""
    import runpy

    from training_runs import _models

    if launched:
        from kohya_bucket.trainers import sdscripts

        sdscripts.install()
    root = os.environ["SD_SCRIPTS_DIR"]
    sys.path.insert(0, root)
    from library import config_util, train_util  # noqa: F401

    took: list[float] = []
    original = train_util.DatasetGroup.new_cache_latents

    def timed(self, *arguments):
        start = time.perf_counter()
        original(self, *arguments)
        took.append(time.perf_counter() - start)
        raise SystemExit(0)

    train_util.DatasetGroup.new_cache_latents = timed
    script = Path(root) / "train_network.py"
    sys.argv = [str(script), "--dataset_config", str(config), "--output_dir", str(config.parent / "out"),
                "--output_name", "x", "--cache_latents", "--cache_latents_to_disk", "--seed", "1",
                "--max_train_steps", "1", "--network_module", "networks.lora", "--network_dim", "2",
                *_models(config.parent)]  # fmt: skip
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    return took[0]


def precomputed(config: Path) -> float:
    """Seconds that `precompute_latents` encodes for, into npz beside the images."""
    from kohya_bucket import BucketedDataset, KohyaBuckets
    from kohya_bucket.latents.encode.precompute import precompute_latents
    from kohya_bucket.latents.vae.diffusers_vae import load_encoder
    from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles

    vae_in(config.parent / "vae")
    encoder = load_encoder(config.parent / "vae", device="cpu", dtype="float32", architecture="sd")
    images = sorted((config.parent / "images").glob("*.jpg"))
    dataset = BucketedDataset(images, KohyaBuckets((256, 256), 128, 512, 64))
    start = time.perf_counter()
    precompute_latents(dataset, encoder, NpzFiles("sd"))
    return time.perf_counter() - start


def bare(config: Path) -> float:
    """Seconds that the VAE takes for the same buckets in the same batches, with the pixels ready."""
    import torch

    from kohya_bucket.latents.vae.batches import BatchLimit
    from kohya_bucket.trainers.sdscripts.config import read_config
    from kohya_bucket.trainers.sdscripts.plan import overview

    read = read_config(config)
    assert read.options is not None
    (dataset,) = overview(read, read.options).datasets
    buckets, counts = np.unique(dataset.items.placement.bucket_sizes, axis=0, return_counts=True)
    vae, limit = vae_in(config.parent / "vae"), BatchLimit("cpu")
    with torch.inference_mode():
        batches = []
        for (width, height), count in zip(buckets.tolist(), counts.tolist(), strict=True):
            most = limit.most((width, height))
            sizes = [most] * (count // most) + [count % most] * (count % most > 0)
            batches += [torch.rand(n, 3, height, width) * 2 - 1 for n in sizes]
        start = time.perf_counter()
        for pixels in batches:
            vae.encode(pixels).latent_dist.sample()
        return time.perf_counter() - start


def run(side: str, config: Path, count: int) -> float:
    """Images a second of one side, from nothing."""
    images = config.parent / "images"
    for path in images.glob("*.npz"):
        path.unlink()
    path = os.pathsep.join([str(ROOT / "compat_tests" / "small_models"), str(ROOT / "compat_tests"), str(ROOT)])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1",
                   "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path, "SMALL_MODELS": "1",
                   "SMALL_TOKENIZERS": str(config.parent / "tokenizers")}  # fmt: skip
    command = [sys.executable, str(HERE), "--side", side, "--config", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    if side != "vae":
        assert len(list(images.glob("*.npz"))) == count
    return count / float(done.stdout.strip().splitlines()[-1])


def page(rounds: list[list[float]], images: int) -> str:
    """What was measured; each round has a rate for each of `SIDES`."""
    from origin import commit

    names = ("sd-scripts alone", "sd-scripts behind the launcher", "`precompute --format npz`", "the VAE alone")
    lines = [
        "# Caching latents (`benchmarks/caching.py`)", "",
        f"{images} JPEGs of about 640x480 at 256 px, by the real `train_network.py` with a tiny VAE on the "
        "processor: what is around a VAE takes nearly all of the time here. sd-scripts keeps its default, one image a "
        "batch; the others choose.", "",
        "| who encodes | images/s | 1,000 images wait | as fast as sd-scripts alone |", "| --- | ---: | ---: | ---: |",
    ]  # fmt: skip
    for name, column in zip(names, zip(*rounds, strict=True), strict=True):
        ratios = sorted(rate / row[0] for rate, row in zip(column, rounds, strict=True))
        rate = statistics.median(column)
        lines.append(
            f"| {name} | {rate:.1f} | {1000 / rate:.0f} s | {statistics.median(ratios):.1f} times ({ratios[0]:.1f} to "
            f"{ratios[-1]:.1f}) |"
        )
    of_precompute = sorted(row[1] / row[2] for row in rounds)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    lines += ["", f"Launched by precompute: {statistics.median(of_precompute):.2f} ({of_precompute[0]:.2f} to "
              f"{of_precompute[-1]:.2f}). {len(rounds)} rounds (medians); {os.cpu_count()} cores, load average "
              f"{load:.1f} at the end; commit {commit()}."]  # fmt: skip
    return "\n".join(lines) + "\n"


def main_() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "caching.md")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        if options.side in ("alone", "launched"):
            seconds = trainer(options.config, launched=options.side == "launched")
        else:
            seconds = {"precompute": precomputed, "vae": bare}[options.side](options.config)
        print(f"\n{seconds}", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = make(Path(folder) / "data", options.images)
        rounds = []
        for _ in range(options.rounds):
            rounds.append([run(side, config, options.images) for side in SIDES])
            print(dict(zip(SIDES, map(round, rounds[-1], [1] * len(SIDES)), strict=True)), flush=True)
    text = page(rounds, options.images)
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main_()
