"""Latents: encoded once, stored safely, read fast. Nothing here imports torch before it encodes.

Names are imported when they are first used: the command line lists model families without their arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import importer

if TYPE_CHECKING:
    from kohya_bucket.latents.encode.precompute import precompute_latents
    from kohya_bucket.latents.encode.worker import PrecomputeReport
    from kohya_bucket.latents.store.latent_store import LatentStore
    from kohya_bucket.latents.store.writer import StoreWriter
    from kohya_bucket.latents.vae.encoder import PosteriorEncoder, VAEEncoder
else:
    __getattr__ = importer(
        __name__,
        {
            "kohya_bucket.latents.encode.precompute": ["precompute_latents"],
            "kohya_bucket.latents.encode.worker": ["PrecomputeReport"],
            "kohya_bucket.latents.store.latent_store": ["LatentStore"],
            "kohya_bucket.latents.store.writer": ["StoreWriter"],
            "kohya_bucket.latents.vae.encoder": ["PosteriorEncoder", "VAEEncoder"],
        },
    )

__all__ = ["LatentStore", "PosteriorEncoder", "PrecomputeReport", "StoreWriter", "VAEEncoder", "precompute_latents"]


def __dir__() -> list[str]:
    return list(__all__)
