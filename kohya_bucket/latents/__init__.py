"""Latents: encoded once, stored safely, read fast. Nothing here imports torch before it encodes.

Names are imported when they are first used: the command line lists model families without their arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.lazy import importer

if TYPE_CHECKING:
    from kohya_bucket.latents.encoder import PosteriorEncoder, VAEEncoder
    from kohya_bucket.latents.precompute import PrecomputeReport, precompute_latents
    from kohya_bucket.latents.store import LatentStore
    from kohya_bucket.latents.writer import StoreWriter
else:
    __getattr__ = importer(
        __name__,
        {
            "kohya_bucket.latents.encoder": ["PosteriorEncoder", "VAEEncoder"],
            "kohya_bucket.latents.precompute": ["PrecomputeReport", "precompute_latents"],
            "kohya_bucket.latents.store": ["LatentStore"],
            "kohya_bucket.latents.writer": ["StoreWriter"],
        },
    )

__all__ = ["LatentStore", "PosteriorEncoder", "PrecomputeReport", "StoreWriter", "VAEEncoder", "precompute_latents"]


def __dir__() -> list[str]:
    return list(__all__)
