"""ai-toolkit's objects, as far as the adapter uses them; the seams check that they are like this."""

from __future__ import annotations

from typing import Any, Protocol

CACHED = "cache_latents and cache_latents_to_disk"
"""Keys by which latents are cached."""


class FileItem(Protocol):
    """One image, clip or sound of a dataset, and how it is cut; `FileItemDTO` there."""

    path: str
    control_path: Any
    width: int
    height: int
    num_frames: int
    flip_x: bool
    flip_y: bool
    scale_to_width: int
    scale_to_height: int
    crop_x: int
    crop_y: int
    crop_width: int
    crop_height: int


class SameSize(Protocol):
    """What is trained at one size: positions in the dataset's `file_list`; `Bucket` there."""

    width: int
    height: int
    file_list_idx: list[int]


class Dataset(Protocol):
    """One folder at one resolution; `AiToolkitDataset` there."""

    dataset_config: Any
    sd: Any
    batch_size: int
    file_list: list[FileItem]
    buckets: dict[str, SameSize]
    is_caching_latents: bool
    transform: Any
    caption_dict: Any

    def _get_single_item(self, index: int, _attempts: int = 0) -> Any: ...
