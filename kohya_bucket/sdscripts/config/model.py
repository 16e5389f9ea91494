"""What a config says once everything is inherited: `SubsetConfig`, `DatasetConfig`, and the images: `ImageList`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.dataset_keys import DatasetKeys
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.sdscripts.config.schema import Kind

__all__ = ["DatasetConfig", "ImageList", "SubsetConfig"]


@dataclass(frozen=True)
class SubsetConfig:
    """One subset, with every value that sd-scripts would use. `place` names it in messages."""

    number: int
    place: str
    kind: Kind
    image_dir: str | None = None
    metadata_file: str | None = None
    conditioning_data_dir: str | None = None
    num_repeats: int = 1
    is_reg: bool = False
    class_tokens: str | None = None
    caption_extension: str = ".caption"
    cache_info: bool = False
    alpha_mask: bool = False
    shuffle_caption: bool = False
    caption_separator: str = ","
    keep_tokens: int = 0
    keep_tokens_separator: str = ""
    secondary_separator: str | None = None
    enable_wildcard: bool = False
    color_aug: bool = False
    flip_aug: bool = False
    face_crop_aug_range: tuple[float, float] | None = None
    random_crop: bool = False
    caption_prefix: str | None = None
    caption_suffix: str | None = None
    caption_dropout_rate: float = 0.0
    caption_dropout_every_n_epochs: int = 0
    caption_tag_dropout_rate: float = 0.0
    token_warmup_min: int = 1
    token_warmup_step: float = 0
    custom_attributes: Mapping[str, Any] = field(default_factory=dict)
    resize_interpolation: str | None = None

    @property
    def identity(self) -> tuple[str | None, ...]:
        """What sd-scripts compares to find a subset that was given twice."""
        if self.kind is Kind.FINE_TUNING:
            return (self.metadata_file,)
        return (self.image_dir,)


@dataclass(frozen=True)
class DatasetConfig:
    """One dataset, with every value that sd-scripts would use. `resolution` is (width, height), None if missing."""

    number: int
    place: str
    kind: Kind
    subsets: tuple[SubsetConfig, ...]
    resolution: tuple[int, int] | None = None
    batch_size: int = 1
    enable_bucket: bool = False
    min_bucket_reso: int = 256
    max_bucket_reso: int = 1024
    bucket_reso_steps: int = 64
    bucket_no_upscale: bool = False
    validation_split: float = 0.0
    validation_seed: int | None = None
    prior_loss_weight: float = 1.0
    network_multiplier: float = 1.0
    resize_interpolation: str | None = None
    skip_image_resolution: tuple[int, int] | None = None
    train_inpainting: bool = False
    debug_dataset: bool = False

    @property
    def dataset_keys(self) -> DatasetKeys:
        """The part that decides the buckets.

        Raises:
            ValueError: no resolution is given.
        """
        if self.resolution is None:
            raise ValueError(f"{self.place} has no resolution")
        return DatasetKeys(
            resolution=self.resolution,
            enable_bucket=self.enable_bucket,
            min_bucket_reso=self.min_bucket_reso,
            max_bucket_reso=self.max_bucket_reso,
            bucket_reso_steps=self.bucket_reso_steps,
            bucket_no_upscale=self.bucket_no_upscale,
        )


@dataclass(frozen=True)
class ImageList:
    """The images of one dataset, in the order in which sd-scripts holds them.

    Attributes:
        keys: [N] the keys under which sd-scripts keeps them: the paths, or the keys of the metadata.
        paths: [N] the files.
        stated_sizes: [N, 2] int32 (width, height) from metadata that sd-scripts trusts; 0 where none is stated,
            or for images in a `metadata_cache.json` whose sizes may be wrong there (WebP, edited since).
        repeats: [N] int64, how often an epoch trains each image.
        is_reg: [N] bool, regularization images.
        subset: [N] int32, number of the subset, from 1.
        conditioning: [N] the control images of a ControlNet dataset, "" where there is none; empty otherwise.
        predefined: the bucket sizes that the metadata prescribes (sd-scripts 0.9 with prepared metadata).
        skipped: (key, reason) of the images that `skip_image_resolution` leaves out; they are in no other column.
    """

    keys: tuple[str, ...]
    paths: tuple[str, ...]
    stated_sizes: IntArray
    repeats: npt.NDArray[np.int64]
    is_reg: npt.NDArray[np.bool_]
    subset: IntArray
    conditioning: tuple[str, ...] = ()
    predefined: tuple[tuple[int, int], ...] | None = None
    skipped: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.keys)
