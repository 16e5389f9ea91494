"""Encoding on a Ray cluster of one machine, beside the local engine: images/s, and how much the cluster costs.

    benchmarks/ray_engine.py [--images 480] [--rounds 3] [--output FILE]

The images and the stub of `precompute.py`: 50 ms for a batch of 4. Both engines write the same items into shards, one
after the other in each round, the local one in this process, the other one by an actor and by tasks of a cluster that
runs here. Measured is the time from the first image to the last shard, without starting the cluster, its processes or
the encoder: what is left is what the cluster costs while it works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
os.environ["RAY_ADDRESS"] = "local"  # a cluster of its own
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # of the cluster's processes

from origin import commit  # noqa: E402
from precompute import make  # noqa: E402

from kohya_bucket.buckets import KohyaBuckets  # noqa: E402
from kohya_bucket.images import read_sizes  # noqa: E402
from kohya_bucket.latents.encode.precompute import StoreOutput, encode_items  # noqa: E402
from kohya_bucket.latents.items import EncodeOptions, LatentItems  # noqa: E402
from kohya_bucket.latents.on_ray import Actors, encode_on_ray  # noqa: E402

BATCH = 4


class Stub:
    """As fast as a GPU might be."""

    downsample_factor, latent_channels, scale_factor, fingerprint = 8, 4, 0.18215, "stub"

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds = seconds

    def encode(self, pixels):
        import torch

        time.sleep(self.seconds)
        return torch.zeros((len(pixels), 4, pixels.shape[2] // 8, pixels.shape[3] // 8))


def items_of(paths: list[str], folder: Path) -> LatentItems:
    sizes = read_sizes(paths).sizes
    placement = KohyaBuckets((256, 256), min_size=128, max_size=512, reso_steps=64).place(sizes)
    return LatentItems.from_placement(paths, sizes, placement, EncodeOptions("stub", "float16"), folder)


def main() -> None:
    import ray_engine  # this file under a name that the cluster's processes can import

    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "ray_engine.md")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, options.images)
        paths = sorted(map(str, (folder / "images").glob("*.jpg")))
        wanted = items_of(paths, folder)
        with Actors(ray_engine.Stub, 1) as crew:
            # so that every process has started, and imported what it needs
            encode_on_ray(wanted.subset(range(64)), crew, folder / "first", folder, batch_size=BATCH)
            encode_items(wanted.subset(range(64)), Stub(), StoreOutput(folder / "second"), folder, batch_size=BATCH)
            for k in range(options.rounds):
                here = encode_items(wanted, Stub(), StoreOutput(folder / f"here{k}"), folder, batch_size=BATCH)
                there = encode_on_ray(wanted, crew, folder / f"there{k}", folder, batch_size=BATCH)
                assert here.encoded == there.encoded == options.images
                rounds.append((options.images / here.seconds, options.images / there.seconds))
                print(f"{rounds[-1][0]:.1f} {rounds[-1][1]:.1f}", flush=True)
    ratios = sorted(there / here for here, there in rounds)
    here, there = (statistics.median(column) for column in zip(*rounds, strict=True))
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    text = f"""# Encoding on Ray (`benchmarks/ray_engine.py`)

{options.images} JPEGs of 640x480, 480x640, 512x512 and 800x450, encoded at 256 px by a stub that takes 50 ms for a
batch of {BATCH}, which allows {BATCH / 0.05:.0f} images/s. One encoder each.

| local, images/s | Ray, images/s | ratio (rounds) |
| ---: | ---: | ---: |
| {here:.1f} | {there:.1f} | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |

Medians of {len(rounds)} rounds. Commit {commit()}, {os.cpu_count()} cores, load average {load:.1f} at the end. Starting
the cluster, its processes and the encoder is not in these times.
"""
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
