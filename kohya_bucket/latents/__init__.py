"""Latents: encoded once, stored safely, read fast. Nothing here imports torch before it encodes.

Names are imported when they are first used: the command line lists model families without their arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import lazy_names

if TYPE_CHECKING:
    from kohya_bucket.latents.encode.precompute import precompute_latents as precompute_latents
    from kohya_bucket.latents.encode.worker import PrecomputeReport as PrecomputeReport
    from kohya_bucket.latents.store.latent_store import LatentStore as LatentStore
    from kohya_bucket.latents.store.writer import StoreWriter as StoreWriter
    from kohya_bucket.latents.vae.encoder import PosteriorEncoder as PosteriorEncoder
    from kohya_bucket.latents.vae.encoder import VAEEncoder as VAEEncoder
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {
        "encode.precompute": "precompute_latents",
        "encode.worker": "PrecomputeReport",
        "store.latent_store": "LatentStore",
        "store.writer": "StoreWriter",
        "vae.encoder": "PosteriorEncoder VAEEncoder",
    })  # fmt: skip
