"""Pieces of work: images of one bucket that are encoded together, named so that every process names them alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kohya_bucket.latents.items import LatentItems

__all__ = ["pieces_of"]

_MOST = 256


def pieces_of(wanted: LatentItems, batch_size: int) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """(name, items) of each piece, in the order in which they are best read; the name is a hash of what is in it."""
    n = len(wanted)
    windows = wanted.images.windows()
    order = np.lexsort((np.arange(n), wanted.bucket_sizes[:, 1], wanted.bucket_sizes[:, 0], windows))
    size = max(batch_size, min(_MOST, -(-n // 64)) // batch_size * batch_size)
    sizes = wanted.bucket_sizes[order]
    alike = np.column_stack([sizes, windows[order]])
    edges = np.flatnonzero(np.append(True, (alike[1:] != alike[:-1]).any(axis=1)))
    for start, stop in zip(edges, [*edges[1:], n], strict=True):
        for at in range(start, stop, size):
            items = order[at : min(at + size, stop)].astype(np.int64)
            text = "\n".join([repr(wanted.encoding), str(tuple(sizes[at])), *(wanted.sources[i] for i in items)])
            yield hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest(), items
