"""What needs a GPU: idle time with the times that steps take there, and encoding.

    python benchmarks/gpu.py [--images 512] [--output FILE]

1. Idle: the epochs of 8 ranks as `lost_time.py` plans them. Each batch's shape is timed on this one GPU, forward and
   backward through a block of Wan 2.1 1.3B's width; a step takes as long as its slowest rank. Of sequences in a batch
   only their number and length count, so one GPU can time the batches of all ranks one after the other.
2. Encoding: `precompute_latents` with SD 1.5's VAE (random weights) on photos of SDXL's sizes, beside the same VAE
   on the same images one at a time, decoded between the calls as a plain loop does; and its latents beside a CPU's.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from lost_time import WAN, as_table, clips  # noqa: E402
from origin import commit  # noqa: E402

from kohya_bucket import BucketedDataset, KohyaBuckets  # noqa: E402
from kohya_bucket.latents import LatentStore, precompute_latents  # noqa: E402
from kohya_bucket.latents.vae.diffusers_vae import load_encoder  # noqa: E402
from kohya_bucket.planning import EpochPlan, EpochPlanner, idle_share  # noqa: E402

RANKS = 8
ROUNDS = 5
HEAD = 128


class Block(nn.Module):
    """Attention and a feed-forward part of four times the width, each behind a norm and beside a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        heads = self.qkv(self.first(x)).view(n, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*heads.unbind())
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x + self.down(gelu(self.up(self.second(x))))


class Clock:
    """Seconds of a batch of so many sequences of so many tokens, forward and backward; each is timed once."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.block = Block(WAN.width).to(device, dtype)
        self.wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
        self.known: dict[tuple[int, int], float] = {}

    def __call__(self, images: int, tokens: int) -> float:
        key = images, tokens
        if key not in self.known:
            x = torch.randn(images, tokens, WAN.width, device=self.device, dtype=self.dtype, requires_grad=True)
            took = []
            for _ in range(ROUNDS + 2):
                self.wait()
                began = time.perf_counter()
                self.block(x).square().mean().backward()
                self.wait()
                took.append(time.perf_counter() - began)
            self.known[key] = statistics.median(took[2:])
        return self.known[key]


def step_times(plan: EpochPlan, tokens: np.ndarray, clock: Clock) -> np.ndarray:
    """[steps, ranks] seconds; the batches of a plan for one rank are dealt out in their order."""
    if plan.world_size == 1:
        times = [clock(int(plan.length[s]), int(tokens[plan.bucket(s, 0)])) for s in range(plan.steps)]
        return np.array(times[: plan.steps // RANKS * RANKS]).reshape(-1, RANKS)
    lengths = [plan.rank_lengths(rank) for rank in range(RANKS)]
    return np.array([
        [clock(int(lengths[r][s]), int(tokens[plan.bucket(s, r)])) for r in range(RANKS)] for s in range(plan.steps)
    ])  # fmt: skip


def idle_rows(clock: Clock) -> list[list[str]]:
    items = clips(2_000, 0)
    tokens = np.asarray(items["bucket_tokens"])
    rows = []
    for name, ranks, how in (
        ("shuffled", 1, "one"), ("one shape", RANKS, "one"), ("equal cost", RANKS, "equal_cost")
    ):  # fmt: skip
        plan = EpochPlanner(**items, batch_size=1, world_size=ranks, step_shapes=how).plan()
        times = step_times(plan, tokens, clock)
        rows.append([name, f"{len(times):,}", f"{idle_share(times):.1%}", f"{times.max(axis=1).sum():.1f}"])
    return rows


def photos(folder: Path, count: int) -> list[Path]:
    random = np.random.default_rng(0)
    paths = []
    for k in range(count):
        width, height = [(1216, 832), (832, 1216), (1024, 1024), (1344, 768)][k % 4]
        small = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
        paths.append(folder / f"{k:04d}.jpg")
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    return paths


def vae_folder(folder: Path) -> Path:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4,
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def one_at_a_time(encoder, dataset: BucketedDataset) -> float:
    """Seconds of a plain loop: decode an image, encode it, take the latents to the CPU."""
    began = time.perf_counter()
    for k in range(len(dataset)):
        pixels = dataset[k]["image"]
        encoder.encode(pixels[None]).cpu()
    return time.perf_counter() - began


def encoding_rows(folder: Path, device: torch.device, count: int) -> tuple[list[list[str]], str]:
    paths = photos(folder, count)
    dataset = BucketedDataset(paths, KohyaBuckets.for_arch("sdxl"))
    vae = vae_folder(folder / "vae")
    rows = []
    for dtype in ("float32", "bfloat16"):
        encoder = load_encoder(vae, device=device, dtype=dtype, architecture="sd")
        encoder.encode(dataset[0]["image"][None])
        alone = one_at_a_time(encoder, dataset)
        for batch in (1, 4, 16):
            took = []
            for k in range(3):
                store = folder / f"store-{dtype}-{batch}-{k}"
                began = time.perf_counter()
                report = precompute_latents(dataset, encoder, store, batch_size=batch)
                took.append(time.perf_counter() - began)
                assert report.encoded == count, report
            median = statistics.median(took)
            rows.append([
                dtype, str(batch), f"{count / alone:.1f}", f"{count / median:.1f}",
                f"{count / max(took):.1f} to {count / min(took):.1f}", f"{alone / median:.2f}",
            ])  # fmt: skip
    few = BucketedDataset(paths[:8], KohyaBuckets.for_arch("sdxl"))
    for name in ("cpu", device):
        encoder = load_encoder(vae, device=name, dtype="float32", architecture="sd")
        precompute_latents(few, encoder, folder / f"few-{torch.device(name).type}", batch_size=4)
    gpu, cpu = (LatentStore(folder / f"few-{kind}") for kind in (device.type, "cpu"))
    off = max(float(np.abs(gpu.read(k).astype(float) - cpu.read(k)).max()) for k in range(8))
    scale = max(float(np.abs(cpu.read(k)).max()) for k in range(8))
    return rows, f"Largest difference of 8 images' latents to those of a CPU, both float32: {off:.1e} of {scale:.1f}."


def out_of_memory(folder: Path, device: torch.device) -> str:
    """A batch that does not fit: what is said, and that what is stored is the same."""
    paths = sorted(folder.glob("*.jpg"))[2::4][:16]
    dataset = BucketedDataset(paths, KohyaBuckets.for_arch("sdxl"))
    encoder = load_encoder(folder / "vae", device=device, dtype="float32", architecture="sd")
    stores = [folder / "whole", folder / "halved"]
    precompute_latents(dataset, encoder, stores[0], batch_size=2)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    encoder.encode(torch.stack([dataset[k]["image"] for k in range(4)]))
    room = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(room * 1.3)
    report = precompute_latents(dataset, encoder, stores[1], batch_size=16)
    torch.cuda.set_per_process_memory_fraction(1.0)
    whole, halved = (LatentStore(store) for store in stores)
    off = max(float(np.abs(whole.read(k).astype(float) - halved.read(k)).max()) for k in range(len(paths)))
    return (
        f"With memory for about five images, a batch of 16 encoded {report.encoded} of {len(paths)}; largest "
        f"difference to batches of 2: {off:.1e}. Said: {'; '.join(report.notes) or 'nothing'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--output", type=Path, default=REPO / "benchmarks" / "results" / "gpu.md")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    idle = idle_rows(Clock(device, dtype))
    with tempfile.TemporaryDirectory() as temporary:
        encoding, difference = encoding_rows(Path(temporary), device, options.images)
        full = out_of_memory(Path(temporary), device) if device.type == "cuda" else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    parts = [
        "# On a GPU (`benchmarks/gpu.py`)",
        f"## Idle time of {RANKS} ranks: 2,000 clips, Wan 2.1 1.3B, batches of 1",
        as_table(["a step", "steps", "idle", "seconds, one block"], idle),
        "Each shape of batch timed on one GPU; a step lasts as long as its slowest rank.",
        f"## Encoding {options.images} photos",
        as_table(["type", "batch", "one at a time, images/s", "precompute, images/s", "rounds", "ratio"], encoding),
        difference,
        full,
        f"{name}, PyTorch {torch.__version__}, Python {platform.python_version()}; commit {commit()}.",
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
