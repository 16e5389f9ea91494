"""Images decoded, resized and cropped on threads, ahead of the encoder, straight into the batches they belong to."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.resize import resize_and_crop, to_floats
from kohya_bucket.latents.items import LatentItems

__all__ = ["DecodedBatch", "give_way", "prefetch"]

Pixels = npt.NDArray[np.uint8]
_NICENESS = 5


@dataclass
class DecodedBatch:
    """Images of one bucket: positions among the wanted ones, pixels, and alpha masks.

    Pixels are [B, H, W, 3] uint8, or with `as_floats` [B, 3, H, W] float32 in -1..1.

    A mask is None where the image is opaque or masks were not asked for. `failed` lists (position, reason) of
    images that could not be read.
    """

    items: list[int]
    pixels: npt.NDArray[Any] | None
    masks: list[Pixels | None]
    failed: list[tuple[int, str]]


@dataclass
class _Filling:
    """A batch whose images are being decoded into their rows of `pixels`."""

    bucket: tuple[int, int]
    pixels: npt.NDArray[Any]
    items: list[int] = field(default_factory=list)
    running: list[Future[Pixels | None]] = field(default_factory=list)

    def complete(self) -> DecodedBatch:
        """Wait for all of its images."""
        rows, masks, failed = [], [], []
        for row, (i, future) in enumerate(zip(self.items, self.running, strict=True)):
            try:
                masks.append(future.result())
                rows.append(row)
            except KohyaBucketError as error:
                failed.append((i, str(error)))
        n = len(self.items)
        pixels = self.pixels[:n] if len(rows) == n else self.pixels[rows]
        return DecodedBatch([self.items[row] for row in rows], pixels if rows else None, masks, failed)


def prefetch(
    items: Iterable[int], wanted: LatentItems, batch_size: int, pool: ThreadPoolExecutor, ahead: int,
    *, as_floats: bool = False,
) -> Iterator[DecodedBatch]:  # fmt: skip
    """Yield batches of neighbours in `items` that share a bucket, decoding about `ahead` images beforehand.

    `as_floats` makes the floats here, on the threads, for encoders that run on the processor; for others four
    times as few bytes go to the device.
    """
    ahead = max(ahead, batch_size + 1)  # so that the first batch is never one that could still grow
    filling: deque[_Filling] = deque()
    source = iter(items)

    def start() -> None:
        running = sum(len(batch.items) for batch in filling)
        while running < ahead and (i := next(source, None)) is not None:
            bucket = int(wanted.bucket_sizes[i, 0]), int(wanted.bucket_sizes[i, 1])
            if not filling or filling[-1].bucket != bucket or len(filling[-1].items) == batch_size:
                width, height = bucket
                shape = (batch_size, 3, height, width) if as_floats else (batch_size, height, width, 3)
                filling.append(_Filling(bucket, np.empty(shape, np.float32 if as_floats else np.uint8)))
            batch = filling[-1]
            batch.running.append(pool.submit(_decode, wanted, i, batch.pixels[len(batch.items)]))
            batch.items.append(i)
            running += 1

    start()
    while filling:
        done = filling.popleft().complete()
        start()
        yield done


def give_way() -> None:
    """Let the thread that feeds the encoder go before this one, where all processors are busy decoding."""
    if sys.platform == "linux":  # elsewhere priorities belong to processes
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _decode(wanted: LatentItems, i: int, out: npt.NDArray[Any]) -> Pixels | None:
    """Put the pixels of item `i` into `out` [H, W, 3] uint8 or [3, H, W] float32; returns its mask."""
    alpha = wanted.encoding.mask
    pixels = wanted.images.pixels(i, alpha)
    size = (pixels.shape[1], pixels.shape[0])
    if size != tuple(wanted.original_sizes[i]):
        width, height = wanted.original_sizes[i]
        raise KohyaBucketError(
            f"{wanted.paths[i]}: has {size[0]}x{size[1]} pixels, but {width}x{height} when its bucket was chosen; "
            "if it was just edited, run again"
        )
    resized, bucket = wanted.resized_sizes[i], wanted.bucket_sizes[i]
    crop = wanted.crops[i]
    pixels = resize_and_crop(
        pixels, (int(resized[0]), int(resized[1])), (int(bucket[0]), int(bucket[1])),
        wanted.encoding.interpolation, (int(crop[0]), int(crop[1])),
    )  # fmt: skip
    mask = None
    if alpha:
        mask = np.ascontiguousarray(pixels[:, :, 3])
        mask = None if (mask == 255).all() else mask
    if out.dtype == np.uint8:
        out[...] = pixels[:, :, :3]
    else:
        to_floats(pixels, out)
    return mask
