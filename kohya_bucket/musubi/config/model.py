"""One data set of a musubi-tuner config, with every key that decides what is trained.

Source of names and defaults: kohya-ss/musubi-tuner 0.3.4, `dataset/config_utils.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ClipKeys", "DatasetKeys", "ImageKeys"]


@dataclass(frozen=True)
class DatasetKeys:
    """What images and clips have in common. Sizes are (width, height)."""

    resolution: tuple[int, int] = (960, 544)
    enable_bucket: bool = False
    bucket_no_upscale: bool = False
    caption_extension: str | None = None
    batch_size: int = 1
    num_repeats: int = 1
    cache_directory: str | None = None
    control_directory: str | None = None
    fp_latent_window_size: int = 9

    @property
    def directory(self) -> str | None:
        """The folder that is listed, if one is."""
        return None

    @property
    def jsonl_file(self) -> str | None:
        """The list of items, if one is given; a folder comes first."""
        return None

    @property
    def caches(self) -> str | None:
        """Where its caches lie."""
        return self.cache_directory if self.cache_directory is not None else self.directory


@dataclass(frozen=True)
class ImageKeys(DatasetKeys):
    """A data set of images."""

    image_directory: str | None = None
    image_jsonl_file: str | None = None
    multiple_target: bool = False
    fp_1f_clean_indices: tuple[int, ...] | None = None
    fp_1f_target_index: int | None = None
    fp_1f_no_post: bool = False
    no_resize_control: bool = False
    control_resolution: tuple[int, int] | None = None

    @property
    def directory(self) -> str | None:
        return self.image_directory

    @property
    def jsonl_file(self) -> str | None:
        return self.image_jsonl_file


@dataclass(frozen=True)
class ClipKeys(DatasetKeys):
    """A data set of clips."""

    video_directory: str | None = None
    video_jsonl_file: str | None = None
    target_frames: tuple[int, ...] = (1,)
    frame_extraction: str = "head"
    frame_stride: int = 1
    frame_sample: int = 1
    max_frames: int = 129
    source_fps: float | None = None

    @property
    def directory(self) -> str | None:
        return self.video_directory

    @property
    def jsonl_file(self) -> str | None:
        return self.video_jsonl_file
