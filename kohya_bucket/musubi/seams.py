"""Where musubi-tuner is held on to."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from kohya_bucket.adapter.batches import PlannedBatch
from kohya_bucket.adapter.config_source import load_source
from kohya_bucket.adapter.door import exit_with_message
from kohya_bucket.adapter.seams import Owners, Place, Seam, Subject, calling_frame
from kohya_bucket.adapter.shapes import Behaves, Inherits, Offers, Takes, Uses
from kohya_bucket.errors import ConfigError
from kohya_bucket.musubi.architectures import ARCHITECTURES
from kohya_bucket.musubi.batches import planned_item
from kohya_bucket.musubi.cache_seams import CACHING, clip_selector
from kohya_bucket.musubi.config import ClipKeys, DatasetKeys
from kohya_bucket.musubi.hv_train import mend
from kohya_bucket.musubi.objects import Accelerator, BatchManager, Dataset, Group, Item
from kohya_bucket.musubi.rules import picture_rule

__all__ = ["SUBJECTS"]


def _group_item(place: Place, self: Group, index: Any, /) -> Any:
    if not isinstance(index, PlannedBatch):
        return place.original(self, index)
    with exit_with_message():
        return planned_item(self, index)


def _sanitize(place: Place, self: Any, user_config: dict[str, Any], **more: Any) -> Any:
    with exit_with_message():
        user_config = place.door.read_options(user_config)
        try:
            return place.original(self, user_config, **more)
        except Exception as error:  # it names neither keys nor what to do, and ends in a traceback
            raise ConfigError(
                f"musubi-tuner refuses the dataset config: {error}; `kohya-bucket plan` names each mistake in it"
            ) from error


def _load(place: Place, file: str, **more: Any) -> Any:
    with exit_with_message():
        load_source(file, "musubi-tuner")
    return place.original(file, **more)


def _make_accelerator(place: Place, self: Any, *args: Any, **kwargs: Any) -> None:
    place.original(self, *args, **kwargs)
    place.door.resume.watch(self)


def _backward(place: Place, self: Any, loss: Any, **kwargs: Any) -> Any:
    scale = place.door.resume.loss_scale()
    return place.original(self, loss if scale == 1 else loss * scale, **kwargs)


def _make_group(place: Place, dataset_group_blueprint: Any, training: bool = False, **more: Any) -> Any:
    if training and "shared_epoch" not in more:
        mend(calling_frame(), place.door)
    return place.original(dataset_group_blueprint, training, **more)


_GROUP_KEYS = ("dataset_group_blueprint", "training", "num_timestep_buckets", "shared_epoch", "audio_spec")
_DATASET_KEYS = (
    "resolution", "caption_extension", "batch_size", "num_repeats", "enable_bucket", "bucket_no_upscale",
    "cache_directory", "control_directory", "fp_latent_window_size", "debug_dataset", "architecture",
)  # fmt: skip
_IMAGE_KEYS = (
    "image_directory", "image_jsonl_file", "multiple_target", "fp_1f_clean_indices", "fp_1f_target_index",
    "fp_1f_no_post", "no_resize_control", "control_resolution", "flux_kontext_no_resize_control",
    "qwen_image_edit_no_resize_control", "qwen_image_edit_control_resolution",
)  # fmt: skip
_CLIP_KEYS = (
    "video_directory", "video_jsonl_file", "target_frames", "frame_extraction", "frame_stride", "frame_sample",
    "max_frames", "source_fps", "audio_spec",
)  # fmt: skip


def _order(owners: Owners) -> tuple[Seam, ...]:
    manager = "BucketBatchManager"
    used = ("bucket_batch_indices", "buckets", "batch_size", "timestep_pool")
    return (
        Seam("DatasetGroup", (Inherits("__getitem__", "__len__"), Offers(Group))),
        Seam("DatasetGroup.__getitem__", (), _group_item),
        Seam("ImageDataset", (Offers(Dataset),)),
        Seam("VideoDataset", (Offers(Dataset),)),
        Seam("ItemInfo", (Offers(Item),)),
        Seam(manager, (Offers(BatchManager),)),
        Seam(f"{manager}.__getitem__", (Takes("idx"), Uses(*used))),
        Seam("load_user_config", (), _load),
        Seam("ConfigSanitizer.sanitize_user_config", (), _sanitize),
        Seam("generate_dataset_group_by_blueprint", (), _make_group, only=_GROUP_KEYS),
        Seam("ImageDataset.__init__", only=(*_DATASET_KEYS, *_IMAGE_KEYS), defaults="ImageDatasetParams"),
        Seam("VideoDataset.__init__", only=(*_DATASET_KEYS, *_CLIP_KEYS), defaults="VideoDatasetParams"),
    )


def _resuming(owners: Owners) -> tuple[Seam, ...]:
    return (Seam("Accelerator", (Offers(Accelerator),)), Seam("Accelerator.__init__", (), _make_accelerator))


def _weighing(owners: Owners) -> tuple[Seam, ...]:
    return (Seam("Accelerator.backward", (), _backward),)


_SIZES = [(w, h) for w in range(90, 1800, 211) for h in range(70, 1700, 203)]
_MODES = [(False, False), (True, False), (True, True)]


def _placements(theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Images that musubi-tuner places without a mistake: none is so narrow that a side becomes 0."""
    for family in ("wan", "ho1"):
        for enable_bucket, no_upscale in _MODES if family in theirs.ARCHITECTURE_STEPS_MAP else ():
            keys = DatasetKeys((960, 544), enable_bucket, no_upscale)
            selector = theirs(keys.resolution, enable_bucket, no_upscale, family)
            yield from _buckets(selector, keys, family, _SIZES)


def _clips(theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Clips, by what the code that caches them chooses sizes with."""
    for enable_bucket, no_upscale in _MODES:
        keys = ClipKeys((960, 544), enable_bucket, no_upscale)
        selector = clip_selector(theirs, _Clips(**vars(keys), architecture="wan"))
        if selector is not None:
            yield from _buckets(selector, keys, "wan", _SIZES[::7])


class _Clips(SimpleNamespace):
    def __getattr__(self, name: str) -> None:
        """A data set that has nothing else."""


def _buckets(selector: Any, keys: DatasetKeys, family: str, sizes: Any) -> Iterator[tuple[str, Any, Any]]:
    placement = picture_rule(keys, ARCHITECTURES[family]).place(sizes)
    how = f"enable_bucket = {keys.enable_bucket}, bucket_no_upscale = {keys.bucket_no_upscale}"
    for size, expected in zip(sizes, placement.bucket_sizes.tolist(), strict=True):
        answer = tuple(selector.get_bucket_resolution(size))
        yield f"{size[0]}x{size[1]} for {family} ({how})", answer, tuple(expected)


def _planning(owners: Owners) -> tuple[Seam, ...]:
    return (
        Seam("BucketSelector", (Behaves(_placements),)),
        Seam("VideoDataset.retrieve_latent_cache_batches", (Behaves(_clips),)),
    )


SUBJECTS = (
    Subject("order", "epochs are musubi-tuner's own", _order, orders_epochs=True),
    Subject("resuming", "a run that is resumed begins its epoch anew", _resuming),
    Subject("weighing", "items of a batch that is shorter than another process' count for more", _weighing),
    CACHING,
    Subject("planning", "`kohya-bucket plan` may show other buckets than those that are cached", _planning),
)
