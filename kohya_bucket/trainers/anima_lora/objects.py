"""anima_lora's objects, as far as the adapter uses them; the seams check that they are like this."""

from __future__ import annotations

from typing import Any, Protocol

from kohya_bucket.buckets.sizes import Size


class ImageRecord(Protocol):
    """One image of a dataset; sizes are (width, height); `ImageInfo` there."""

    image_key: str
    bucket_reso: Size
    resized_size: Size
    image_size: Size
    latents: Any
    latents_npz: str | None


class Dataset(Protocol):
    """One entry of the config; `DreamBoothDataset` there."""

    image_data: dict[str, Any]
    image_to_subset: dict[str, Any]
    bucket_manager: Any
    buckets_indices: Any
    batch_size: int
    current_epoch: int
    current_step: int
    seed: int
    _length: int


class Group(Protocol):
    """The datasets of a run; `DatasetGroup` there."""

    datasets: Any


class Collator(Protocol):
    """What hands over the epoch and the step; `collator_class` there."""

    current_epoch: Any
    current_step: Any
