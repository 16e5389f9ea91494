"""A run that is started as a process of its own, so that it can be killed. Arguments: images, output, then options."""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from kohya_bucket.latents import precompute_latents
from tests.latents.stub_encoders import MeanEncoder, PosteriorStub, dataset_of


def encode(ready: Any, images: Path, output: Path, format: str, seconds: float) -> None:
    """A run in a process that has imported everything already; says through the pipe `ready` when it begins."""
    encoder = PosteriorStub(seconds) if format == "npz" else MeanEncoder(seconds)
    dataset = dataset_of(sorted(images.glob("*.png")))
    ready.send("ready")
    report = precompute_latents(
        dataset, encoder, output, batch_size=2, format=format, architecture="sd", flip=True, shard_bytes=3000,
        flush_seconds=0.1, workers=2,
    )  # fmt: skip
    ready.send(report.encoded)


def meet(place: str, rank: int, world: int) -> None:
    """Wait for all others without the process group, whose time-out a busy machine may exceed in doing nothing."""
    Path(f"{place}{rank}").touch()
    while not all(Path(f"{place}{other}").exists() for other in range(world)):
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--format", default="shards")
    parser.add_argument("--flush", type=float, default=60.0)
    parser.add_argument("--shard-bytes", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--stale-after", type=float, default=30.0)
    parser.add_argument("--gloo", help="file for the rendezvous, then rank/world size")
    options = parser.parse_args()
    if options.gloo:
        place, rank, world = options.gloo.rsplit(":", 2)
        meet(f"{place}.begin", int(rank), int(world))
        torch.distributed.init_process_group(
            "gloo", init_method=Path(place).as_uri(), rank=int(rank), world_size=int(world),
            timeout=timedelta(seconds=5),
        )  # fmt: skip
        torch.distributed.barrier()
    encoder = PosteriorStub(options.seconds) if options.format == "npz" else MeanEncoder(options.seconds)
    print("ready", flush=True)
    report = precompute_latents(
        dataset_of(sorted(options.images.glob("*.png"))), encoder, options.output, batch_size=options.batch_size,
        format=options.format, architecture="sd", flip=True, shard_bytes=options.shard_bytes,
        flush_seconds=options.flush, stale_after=options.stale_after, workers=2,
    )  # fmt: skip
    if options.gloo:
        meet(f"{place}.end", int(rank), int(world))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    done = {
        "encoded": report.encoded,
        "elsewhere": report.elsewhere,
        "failed": report.failed,
        "current": report.current,
    }
    print(json.dumps(done), flush=True)
    if options.gloo:
        os._exit(0)  # torch's gloo threads now and then abort a process that ends in good order


if __name__ == "__main__":
    main()
