"""sd-scripts' objects, as far as the adapter uses them: its code is typed with these, and nothing else is known.

Before anything is replaced, each class of sd-scripts is checked against its type here (`seams.py`).
"""

from __future__ import annotations

from typing import Any, Protocol

from kohya_bucket.buckets.sizes import Size


class ImageRecord(Protocol):
    """One image of a dataset; sizes are (width, height)."""

    image_key: str
    absolute_path: str
    num_repeats: int
    caption: str
    is_reg: bool
    image_size: Size | None
    resized_size: Size
    bucket_reso: Size
    latents: Any
    latents_flipped: Any
    latents_npz: str | None
    latents_original_size: Any
    latents_crop_ltrb: Any
    alpha_mask: Any
    resize_interpolation: str | None


class DroppedRecord(ImageRecord, Protocol):
    """The same since captions that are left out now and then can be cached."""

    caption_dropout_rate: float
    text_encoder_outputs: Any


class Subset(Protocol):
    """One folder, or metadata file, of a dataset."""

    image_dir: str | None
    img_count: int
    flip_aug: bool
    alpha_mask: bool


class NotedSubset(Subset, Protocol):
    """One that may keep sizes and captions in a file."""

    cache_info: bool
    caption_extension: str


class ListedSubset(Subset, Protocol):
    """One that comes from a metadata file."""

    metadata_file: str


class BucketManager(Protocol):
    """The buckets of a dataset, by their sizes."""

    resos: Any
    reso_to_id: Any
    buckets: Any


class HeldDataset(Protocol):
    """What every dataset of a group has."""

    image_data: Any
    bucket_manager: Any
    buckets_indices: Any
    batch_size: int
    current_epoch: int
    current_step: int
    seed: int
    width: int
    height: int
    num_train_images: int
    num_reg_images: int

    def __getitem__(self, index: Any) -> Any: ...


class Dataset(HeldDataset, Protocol):
    """One that has its images itself."""

    image_to_subset: Any
    enable_bucket: bool
    min_bucket_reso: int | None
    max_bucket_reso: int | None
    bucket_reso_steps: int
    bucket_no_upscale: bool
    bucket_info: Any
    _length: int


class DelegatingDataset(HeldDataset, Protocol):
    """One that has another one do it: that of ControlNet."""

    dreambooth_dataset_delegate: Dataset


class Group(Protocol):
    """The datasets of a run."""

    datasets: Any
    image_data: Any
    cumulative_sizes: Any

    def __len__(self) -> int: ...


class Collator(Protocol):
    """What hands over the epoch and the step."""

    current_epoch: Any
    current_step: Any
    dataset: Any


class LatentsStrategy(Protocol):
    """How a model family caches latents."""

    cache_suffix: str
    batch_size: int
    cache_to_disk: bool
    skip_disk_cache_validity_check: bool
    get_latents_npz_path: Any
    is_disk_cached_latents_expected: Any
    cache_batch_latents: Any
    save_latents_to_disk: Any
    load_latents_from_disk: Any


class TextStrategy(Protocol):
    """How a model family caches outputs of its text encoders."""

    batch_size: int | None
    cache_to_disk: bool
    skip_disk_cache_validity_check: bool
    get_outputs_npz_path: Any
    is_disk_cached_outputs_expected: Any
    cache_batch_outputs: Any


def inner_of(dataset: Any) -> Dataset:
    """The dataset that has the images: `dataset` itself, or the one that does its work."""
    inner: Dataset = getattr(dataset, "dreambooth_dataset_delegate", dataset)
    return inner
