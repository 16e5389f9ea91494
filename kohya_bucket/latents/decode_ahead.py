"""Images decoded, resized and cropped on threads, ahead of the encoder, and put together to batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.pixels import load_pixels, resize_and_crop
from kohya_bucket.latents.wanted import Wanted

__all__ = ["Batch", "decode_ahead"]

Pixels = npt.NDArray[np.uint8]
# the 256 results of `encoding.normalize`, by the same float32 operations
_FLOATS = (np.arange(256, dtype=np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


@dataclass
class Batch:
    """Images of one bucket: positions among the wanted ones, pixels, and alpha masks.

    Pixels are [B, H, W, 3] uint8, or with `as_floats` [B, 3, H, W] float32 in -1..1.

    A mask is None where the image is opaque or masks were not asked for. `failed` lists (position, reason) of
    images that could not be read.
    """

    items: list[int]
    pixels: npt.NDArray[Any] | None
    masks: list[Pixels | None]
    failed: list[tuple[int, str]]


def decode_ahead(
    items: Iterable[int], wanted: Wanted, batch_size: int, pool: ThreadPoolExecutor, ahead: int,
    *, as_floats: bool = False,
) -> Iterator[Batch]:  # fmt: skip
    """Yield batches of neighbours in `items` that share a bucket, decoding up to `ahead` images beforehand.

    `as_floats` makes the floats here, on the threads, for encoders that run on the processor; for others four
    times as few bytes go to the device.
    """
    running: deque[tuple[int, Future[tuple[npt.NDArray[Any], Pixels | None]]]] = deque()
    source = iter(items)

    def start() -> None:
        while len(running) < ahead and (i := next(source, None)) is not None:
            running.append((i, pool.submit(_decode, wanted, i, as_floats)))

    start()
    batch = Batch([], None, [], [])
    pixels: list[npt.NDArray[Any]] = []
    while running:
        i, future = running.popleft()
        start()
        if pixels and tuple(wanted.bucket_sizes[i]) != tuple(wanted.bucket_sizes[batch.items[0]]):
            yield _complete(batch, pixels)
            batch, pixels = Batch([], None, [], []), []
        try:
            image, mask = future.result()
        except KohyaBucketError as error:
            batch.failed.append((i, str(error)))
            continue
        batch.items.append(i)
        pixels.append(image)
        batch.masks.append(mask)
        if len(pixels) == batch_size:
            yield _complete(batch, pixels)
            batch, pixels = Batch([], None, [], []), []
    if pixels or batch.failed:
        yield _complete(batch, pixels)


def _complete(batch: Batch, pixels: list[npt.NDArray[Any]]) -> Batch:
    batch.pixels = np.stack(pixels) if pixels else None
    return batch


def _decode(wanted: Wanted, i: int, as_floats: bool) -> tuple[npt.NDArray[Any], Pixels | None]:
    alpha = wanted.recipe.mask
    pixels = load_pixels(wanted.paths[i], alpha=alpha)
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
        wanted.recipe.interpolation, (int(crop[0]), int(crop[1])),
    )  # fmt: skip
    mask = None
    if alpha:
        mask = np.ascontiguousarray(pixels[:, :, 3])
        pixels, mask = np.ascontiguousarray(pixels[:, :, :3]), None if (mask == 255).all() else mask
    if as_floats:
        return np.take(_FLOATS, np.ascontiguousarray(pixels.transpose(2, 0, 1))), mask
    return pixels, mask
