"""How long images and captions wait: sd-scripts alone, behind the launcher, `precompute`, and nothing but the encoder.

    SD_SCRIPTS_DIR=… PYTHON_OF_SD_SCRIPTS benchmarks/caching.py [--images 300] [--captions 100] [--rounds 3]

The real `train_network.py --cache_latents --cache_latents_to_disk` caches, with the tiny random models of
`compat_tests/small_models`, and is ended where its caches are made. Each in a process of its own, one after the other
in each round, on the same images. The VAE alone gets the same buckets and batches as random pixels.

Captions are cached by sd-scripts' real datasets and strategies, one a batch, with encoders that only take time. So are
images of a megapixel and captions by musubi-tuner's programs and ai-toolkit's datasets (`caching_elsewhere.py`), where
MUSUBI_DIR and MUSUBI_PYTHON, AI_TOOLKIT_DIR and AI_TOOLKIT_PYTHON say where these are.
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
ENCODER_SECONDS = {"flux": 0.02, "sdxl": 0.01}  # a caption
HOW = ("encoder", "alone", "launched")
NAMES = {
    "flux": "FLUX's captions in sd-scripts", "sdxl": "SDXL's captions in sd-scripts",
    "musubi-images": "images in musubi-tuner", "musubi-captions": "captions in musubi-tuner",
    "aitk-images": "images in ai-toolkit", "aitk-captions": "captions in ai-toolkit",
}  # fmt: skip
PYTHONS = {"musubi": "MUSUBI_PYTHON", "aitk": "AI_TOOLKIT_PYTHON"}


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


def captions(folder: Path, family: str, how: str) -> float:
    """Seconds that sd-scripts caches text-encoder outputs for, of the shapes of a real encoder; or the encoder runs."""
    from types import SimpleNamespace

    if how == "launched":
        from kohya_bucket.trainers import sdscripts

        sdscripts.install()
    sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
    import torch
    from library import config_util, strategy_base
    from sdscripts_support import ACCELERATOR, LibraryNames, build_groups
    from small_text_encoders import make_family

    torch.set_num_threads(1)
    small = make_family(family, length=512)
    small.caching._batch_size = 1
    shapes = {"flux": [(1, 768), (1, 512, 4096), (512, 3)], "sdxl": [(1, 77, 768), (1, 77, 1280), (1, 1280)]}[family]
    outputs = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]

    def encode_tokens(*_):
        time.sleep(ENCODER_SECONDS[family])
        return [*(part.clone() for part in outputs), None][: 4 if family == "flux" else 3]

    if how == "encoder":
        start = time.perf_counter()
        for _ in folder.glob("*.txt"):
            encode_tokens()
        return time.perf_counter() - start
    small.encoding.encode_tokens = encode_tokens
    subset = {"image_dir": str(folder), "caption_extension": ".txt", "num_repeats": 1}
    library = SimpleNamespace(train_util=LibraryNames(), config_util=config_util)
    group, _ = build_groups(library, {"datasets": [{"resolution": 64, "subsets": [subset]}]})
    for kind, strategy in zip(("Tokenize", "TextEncoding", "TextEncoderOutputsCaching"), small, strict=False):
        getattr(strategy_base, f"{kind}Strategy")._strategy = strategy
    start = time.perf_counter()
    group.new_cache_text_encoder_outputs(small.models, ACCELERATOR)
    return time.perf_counter() - start


def run(side: str, config: Path, count: int) -> float:
    """Images or captions a second of one side, from nothing."""
    images = config.parent / ("captions" if "-" in side else "images")
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
    if side != "vae" and not side.endswith("encoder"):
        assert len(list(images.glob("*.npz"))) == count
    return count / float(done.stdout.strip().splitlines()[-1])


def elsewhere(side: str, folder: Path, count: int) -> dict[str, float]:
    """Images or captions a second in another trainer, by way, from nothing."""
    rates = {}
    for how in HOW:
        for path in folder.rglob("*.safetensors"):
            path.unlink()
        command = [os.environ[PYTHONS[side.split("-")[0]]], str(HERE.with_name("caching_elsewhere.py"))]
        done = subprocess.run([*command, side, how, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{side} {how} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        assert how == "encoder" or len(list(folder.rglob("*.safetensors"))) == count
        rates[f"{side}-{how}"] = count / float(done.stdout.strip().splitlines()[-1])
    return rates


def photos_in(folder: Path, count: int) -> Path:
    """Images of about a megapixel, with captions."""
    from PIL import Image

    folder.mkdir()
    for i in range(count):
        size = [(1200, 900), (900, 1200), (1024, 1024)][i % 3]
        Image.effect_noise(size, 40).convert("RGB").save(folder / f"{i}.jpg")
        (folder / f"{i}.txt").write_text(f"number {i}", encoding="utf-8")
    return folder


def page(rounds: list[list[float]], of_captions: list[dict[str, float]], images: int) -> str:
    """What was measured; each round has a rate for each of `SIDES`, and for each family of encoders and way."""
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
    lines += [
        "", "To disk, one a batch alone, with encoders that only take time; in musubi-tuner with the start of its "
        "program, so that some tenths of a second are no caching:", "",
        "| what | the encoder alone | the trainer alone | behind the launcher | launched by encoder | by alone |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for side in (side for side in NAMES if f"{side}-alone" in of_captions[0]):
        columns = {how: [1000 / row[f"{side}-{how}"] for row in of_captions] for how in HOW}
        cells = [f"{statistics.median(took):.0f} ms" for took in columns.values()]
        for how in ("encoder", "alone"):
            ratios = sorted(took / other for took, other in zip(columns["launched"], columns[how], strict=True))
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        lines.append(f"| {NAMES[side]} | {' | '.join(cells)} |")
    lines += ["", f"Launched by precompute: {statistics.median(of_precompute):.2f} ({of_precompute[0]:.2f} to "
              f"{of_precompute[-1]:.2f}). {len(rounds)} rounds (medians); {os.cpu_count()} cores, load average "
              f"{load:.1f} at the end; commit {commit()}."]  # fmt: skip
    return "\n".join(lines) + "\n"


def main_() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--captions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "caching.md")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    from sdscripts_support import write_images

    if options.side:
        if "-" in options.side:
            family, how = options.side.split("-")
            seconds = captions(options.config.parent / "captions", family, how)
        elif options.side in ("alone", "launched"):
            seconds = trainer(options.config, launched=options.side == "launched")
        else:
            seconds = {"precompute": precomputed, "vae": bare}[options.side](options.config)
        print(f"\n{seconds}", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = make(Path(folder) / "data", options.images)
        write_images(config.parent / "captions", [(64, 64)] * options.captions)
        photos = photos_in(Path(folder) / "photos", options.captions)
        ways = [f"{family}-{how}" for family in ENCODER_SECONDS for how in ("alone", "launched", "encoder")]
        rounds, of_captions = [], []
        for _ in range(options.rounds):
            rounds.append([run(side, config, options.images) for side in SIDES])
            print(dict(zip(SIDES, map(round, rounds[-1], [1] * len(SIDES)), strict=True)), flush=True)
            of_captions.append({way: run(way, config, options.captions) for way in ways})
            for side in (side for side in NAMES if os.environ.get(PYTHONS.get(side.split("-")[0], ""))):
                of_captions[-1].update(elsewhere(side, photos, options.captions))
            print(of_captions[-1], flush=True)
    text = page(rounds, of_captions, options.images)
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main_()
