"""musubi-tuner's objects, as far as the adapter uses them; the seams check that they are like this."""

from __future__ import annotations

from typing import Any, Protocol

BucketKey = tuple[Any, ...]
"""Width, height, then what else must be equal in a batch: frames, sizes of control images."""


class CachedItem(Protocol):
    """One cached item; `ItemInfo` there."""

    latent_cache_path: str
    text_encoder_output_cache_path: str


class BatchManager(Protocol):
    """Buckets with their items, each as often as it is repeated, and the places that batches begin at."""

    batch_size: int
    buckets: dict[BucketKey, list[CachedItem]]
    bucket_batch_indices: list[tuple[BucketKey, int]]
    num_timestep_buckets: int | None
    timestep_pool: list[list[float]] | None


class Selector(Protocol):
    """The bucket of a size."""

    no_upscale: bool

    def get_bucket_resolution(self, image_size: tuple[int, int]) -> tuple[int, int]: ...


class Dataset(Protocol):
    """One dataset of the config."""

    batch_manager: BatchManager
    seed: int
    resolution: tuple[int, int]


class CachedDataset(Protocol):
    """The same, as far as its caches go."""

    architecture: str
    cache_directory: str
    num_repeats: int
    resolution: tuple[int, int]
    enable_bucket: bool
    bucket_no_upscale: bool
    caption_extension: str | None
    datasource: Any


class Group(Protocol):
    """All datasets of the config."""

    datasets: list[Dataset]


class ImageAutoencoder(Protocol):
    """That of Qwen-Image and Krea 2, which came from one of clips."""

    encoder: Any
