"""Latents: encoded once, stored safely, read fast. Nothing here imports torch before it encodes."""

from kohya_bucket.latents.encoder import PosteriorEncoder, VAEEncoder
from kohya_bucket.latents.precompute import PrecomputeReport, precompute_latents
from kohya_bucket.latents.store import LatentStore
from kohya_bucket.latents.writer import StoreWriter

__all__ = ["LatentStore", "PosteriorEncoder", "PrecomputeReport", "StoreWriter", "VAEEncoder", "precompute_latents"]
