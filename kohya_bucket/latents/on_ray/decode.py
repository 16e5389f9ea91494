"""Batches decoded by tasks, on whichever machines have processors to spare, a few ahead of the encoder."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from kohya_bucket.latents.encode.prefetch import DecodedBatch, prefetch
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.on_ray.actors import raise_cause

__all__ = ["decode_ahead"]


def decode_ahead(wanted: LatentItems, batch_size: int, ahead: int, *, as_floats: bool) -> Iterator[DecodedBatch]:
    """The batches of a piece, all of one bucket; at most `ahead` are decoded, or being decoded, and not yet taken."""
    running: deque[tuple[list[int], Any]] = deque()
    starts = iter(range(0, len(wanted), batch_size))
    while True:
        while len(running) < ahead and (at := next(starts, None)) is not None:
            items = list(range(at, min(at + batch_size, len(wanted))))
            running.append((items, _begin(wanted.subset(items), as_floats)))
        if not running:
            return
        items, reference = running.popleft()
        yield _complete(wanted, items, reference, as_floats)


def _begin(wanted: LatentItems, as_floats: bool) -> Any:
    import ray

    return ray.remote(_decode).options(num_cpus=1, max_retries=2).remote(wanted, as_floats)


def _decode(wanted: LatentItems, as_floats: bool) -> DecodedBatch:
    """All items as one batch."""
    n = len(wanted)
    with ThreadPoolExecutor(n if wanted.images.are_far else 1) as pool:  # requests wait side by side
        return next(prefetch(range(n), wanted, n, pool, n, as_floats=as_floats))


def _complete(wanted: LatentItems, items: list[int], reference: Any, as_floats: bool) -> DecodedBatch:
    """What a task decoded; one image at a time where its process ended again and again."""
    import ray

    try:
        batch: DecodedBatch = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise_cause(error)
    except ray.exceptions.RayError as error:
        if len(items) == 1:
            why = f"the process that decodes it ended again and again ({type(error).__name__}): look at this file"
            return DecodedBatch([], None, [], [(items[0], why)])
        ones = [_complete(wanted, [i], _begin(wanted.subset([i]), as_floats), as_floats) for i in items]
        pixels = [one.pixels for one in ones if one.pixels is not None]
        return DecodedBatch(
            [i for one in ones for i in one.items], np.concatenate(pixels) if pixels else None,
            [mask for one in ones for mask in one.masks], [failure for one in ones for failure in one.failed],
        )  # fmt: skip
    return replace(
        batch,
        items=[items[k] for k in batch.items],
        # What Ray gives is mapped read-only, and an encoder may work in place.
        pixels=None if batch.pixels is None else np.array(batch.pixels),
        failed=[(items[k], why) for k, why in batch.failed],
    )
