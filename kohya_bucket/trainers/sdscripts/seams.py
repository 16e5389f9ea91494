"""Every place of sd-scripts that the adapter replaces or relies on, by subject: its checks, and the replacement."""

from __future__ import annotations

import glob
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kohya_bucket.checks import LOADER_OPTIONS, loader_mistake
from kohya_bucket.errors import ConfigError, reading
from kohya_bucket.images.formats import UnreadableImageError
from kohya_bucket.images.resize import INTERPOLATIONS, resize_and_crop
from kohya_bucket.trainers.door.batches import PlannedBatch
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, rule_for
from kohya_bucket.trainers.door.resume import Accelerator
from kohya_bucket.trainers.door.seams import Replaced, Seam, SeamGroup, calling_frame, where
from kohya_bucket.trainers.door.shapes import (
    Behaves,
    Check,
    Fields,
    Inherits,
    Offers,
    Says,
    Takes,
    TakesAmong,
    Uses,
    checksum,
    sample_picture,
)
from kohya_bucket.trainers.sdscripts import objects
from kohya_bucket.trainers.sdscripts.batches import note_epoch, numbered_item, planned_item
from kohya_bucket.trainers.sdscripts.caching import extra_sizes, loaded
from kohya_bucket.trainers.sdscripts.dataset_images import CONTROL_IN_THE_MIDDLE, read_folder
from kohya_bucket.trainers.sdscripts.make_buckets import get_image_size, get_resolutions, make_buckets
from kohya_bucket.trainers.sdscripts.tables import BatchTable

_ENTRY = ("bucket_index", "bucket_batch_size", "batch_index")

OBJECTS = SeamGroup(
    "objects",
    "image records, subsets and datasets",
    (
        Seam("ImageInfo", (Offers(objects.ImageRecord),)),
        Seam("BucketBatchIndex", (Fields(*_ENTRY),)),
        Seam("DreamBoothSubset", (Offers(objects.NotedSubset),)),
        Seam("FineTuningSubset", (Offers(objects.ListedSubset),)),
        Seam("ControlNetSubset", (Offers(objects.NotedSubset),)),
        Seam("DreamBoothDataset", (Offers(objects.Dataset),)),
        Seam("FineTuningDataset", (Offers(objects.Dataset),)),
        Seam("ControlNetDataset", (Offers(objects.DelegatingDataset),)),
        Seam("DatasetGroup", (Offers(objects.Group),)),
        Seam("collator_class", (Offers(objects.Collator),)),
        Seam("BaseDataset.__getitem__", (Uses("image_data", "image_to_subset", "bucket_reso", "resized_size"),)),
    ),
    orders_epochs=True,
)


# Files, their sizes, and the bucket of each.


def _glob_images(seam: Replaced, directory: str, base: str = "*") -> list[str]:
    if base != "*" or glob.has_magic(directory):
        paths: list[str] = seam.original(directory, base)
        return paths
    # As theirs, nothing of a folder that is not there. One that cannot be listed now ends the run.
    with suppress(FileNotFoundError), reading(directory):
        return read_folder(directory, seam.door.owners.named("IMAGE_EXTENSIONS")).images
    return []


def _size_by_cache_name(seam: Replaced, self: Any, absolute_path: str, npz_path: str) -> tuple[Any, Any]:
    # where it is asked of an image, the cache may be another one's: its name only begins like the image's
    return seam.original(self, absolute_path, npz_path) if absolute_path == npz_path else (None, None)


def _list_folders(seam: Replaced, self: Any, subsets: Any, *args: Any, **keys: Any) -> None:
    try:
        seam.original(self, subsets, *args, **keys)
    except (UnicodeDecodeError, AssertionError):  # of a caption, without a word on which and what to do
        from kohya_bucket.trainers.sdscripts.config.files import refuse_broken_captions

        refuse_broken_captions((str(subset.image_dir), subset.caption_extension) for subset in subsets)
        raise


def _list_metadata(seam: Replaced, self: Any, *args: Any, skip_image_resolution: Any = None, **keys: Any) -> None:
    seam.original(self, *args, **keys)
    if skip_image_resolution is not None:
        self.skip_image_resolution = skip_image_resolution  # obeyed when buckets are made


def _make_control_buckets(seam: Replaced, self: objects.DelegatingDataset) -> None:
    if seam.door.options().focus and Uses("trim_and_resize_if_required")(
        seam.door.owners.find("ControlNetDataset.__getitem__")[2]
    ):
        raise ConfigError(CONTROL_IN_THE_MIDDLE)
    seam.original(self)
    self.num_train_images = self.dreambooth_dataset_delegate.num_train_images


def _placements(theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Images that sd-scripts places without a mistake: none is so small or narrow that a side becomes 0."""
    draw = random.Random(0)
    sizes = [(draw.randint(256, 2048), draw.randint(256, 2048)) for _ in range(120)]
    for no_upscale, resolution, steps in ((False, (1024, 1024), 64), (True, (1024, 1024), 64), (True, (512, 768), 32)):
        asked = theirs(no_upscale, resolution, 256, 2048, steps)
        if not no_upscale:
            asked.make_buckets()
        placed = rule_for(DatasetKeys(resolution, True, 256, 2048, steps, no_upscale)).place(sizes)
        expected = zip(placed.bucket_sizes.tolist(), placed.resized_sizes.tolist(), strict=True)
        how = f"{resolution[0]}x{resolution[1]} in steps of {steps}{', no_upscale' if no_upscale else ''}"
        for (width, height), (bucket, resized) in zip(sizes, expected, strict=True):
            answer = asked.select_bucket(width, height)[:2]
            yield f"{width}x{height} at {how}", tuple(map(tuple, answer)), (tuple(bucket), tuple(resized))


_SWITCHES = ("image_data", "enable_bucket", "bucket_no_upscale")
_TABLES = ("bucket_manager", "bucket_info", "buckets_indices", "batch_size", "_length")
_DATASET_KEYS = (
    "subsets", "is_training_dataset", "batch_size", "tokenizer", "max_token_length", "resolution", "network_multiplier",
    "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale",
    "prior_loss_weight", "train_inpainting", "debug_dataset", "validation_split", "validation_seed",
    "resize_interpolation", "skip_image_resolution",
)  # fmt: skip
_OF_CACHE = "LatentsCachingStrategy.get_image_size_from_disk_cache_path"
_DELEGATE = "dreambooth_dataset_delegate"


def _made(name: str, checks: tuple[Check, ...] = (), replacement: Any = None) -> Seam:
    """Where datasets of a kind are made, from keys whose consequences are known."""
    return Seam(f"{name}.__init__", checks, replacement, only=_DATASET_KEYS, defaults=f"{name}Params")


BUCKETS = SeamGroup(
    "buckets",
    "files, their sizes and buckets",
    (
        Seam("BucketManager", (Offers(objects.BucketManager), Behaves(_placements))),
        Seam("IMAGE_EXTENSIONS"),
        Seam("glob_images", (Uses("IMAGE_EXTENSIONS"),), _glob_images),
        Seam("BaseDataset.get_image_size", (), get_image_size),
        Seam("BaseDataset.make_buckets", (Uses(*_SWITCHES, *_TABLES),), make_buckets),
        Seam("ControlNetDataset.make_buckets", (Uses(_DELEGATE, "buckets_indices"),), _make_control_buckets),
        _made("DreamBoothDataset", (Uses("is_training_dataset"),), _list_folders),
        _made("FineTuningDataset", (), _list_metadata),
        _made("ControlNetDataset"),
        Seam("DatasetGroup.get_resolutions", (), get_resolutions),
        Seam(_OF_CACHE, (), _size_by_cache_name),
    ),
    orders_epochs=True,
)


# The order of an epoch, and the batch at a place in it.


def _shuffle_buckets(seam: Replaced, self: objects.Dataset) -> None:
    if not isinstance(self.buckets_indices, BatchTable):
        seam.original(self)


def _set_current_epoch(seam: Replaced, self: objects.Dataset, epoch: int) -> None:
    note_epoch(self, epoch)


def _group_item(seam: Replaced, self: objects.Group, index: int, /) -> Any:
    if isinstance(index, PlannedBatch):
        return planned_item(self, index)
    tables = [getattr(dataset, "buckets_indices", None) for dataset in self.datasets]
    if all(isinstance(table, BatchTable) and table.options.several_sizes for table in tables):
        return numbered_item(self, index)
    return seam.original(self, index)


_HELD = ("bucket_manager", "buckets", "buckets_indices")

BATCHES = SeamGroup(
    "batches",
    "the order of an epoch",
    (
        Seam("BaseDataset.shuffle_buckets", (), _shuffle_buckets),
        Seam("BaseDataset.set_current_epoch", (), _set_current_epoch),
        Seam("BaseDataset.__getitem__", (Takes("index"), Uses(*_HELD, *_ENTRY), Says("alpha_masks", "loss_weights"))),
        Seam("ControlNetDataset.__getitem__", (Takes("index"), Uses(_DELEGATE, *_HELD))),
        Seam("DatasetGroup", (Inherits("__getitem__"),)),
        Seam("DatasetGroup.__getitem__", (), _group_item),
        Seam("DatasetGroup.set_current_epoch", (Takes("epoch"),)),
    ),
    orders_epochs=True,
)


# The dataset config, in which the adapter's own table stands.


def _sanitize_user_config(seam: Replaced, self: Any, user_config: dict[str, Any], **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = seam.original(self, seam.door.read_options(user_config, calling_frame()), **more)
    return result


CONFIG = SeamGroup(
    "config",
    "the dataset config",
    (Seam("ConfigSanitizer.sanitize_user_config", (), _sanitize_user_config),),
    orders_epochs=True,
)


# The loader over a dataset group, and the collator that tells the epoch.


_ARGUMENTS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn")

LOADING = SeamGroup(
    "loading",
    "the loader of a dataset group",
    (
        Seam("collator_class.__init__", (Takes("epoch", "step", "dataset"),)),
        Seam(
            "collator_class.__call__",
            (Takes("examples"), Uses("current_epoch", "current_step", "set_current_epoch", "set_current_step")),
        ),
        Seam("DataLoader.__init__", (TakesAmong(*_ARGUMENTS, "num_workers", "worker_init_fn", "generator"),)),
    ),
    orders_epochs=True,
)


# The accelerator, whose states remember the place in an epoch.


def _prepare_accelerator(seam: Replaced, args: Any, **more: Any) -> Any:
    asked = {name: getattr(args, option, None) for name, option in LOADER_OPTIONS.items()}
    if wrong := loader_mistake({name: value for name, value in asked.items() if value is not None}, LOADER_OPTIONS):
        raise ConfigError(": ".join(wrong))  # here, and not after hours of caching
    seam.door.resume.arguments = args
    accelerator: Accelerator = seam.original(args, **more)
    seam.door.resume.watch(accelerator)
    return accelerator


RESUMING = SeamGroup(
    "resuming",
    "a run that is resumed goes on by sd-scripts' own count",
    (
        Seam("prepare_accelerator", (), _prepare_accelerator),
        Seam("Accelerator", (Offers(Accelerator),)),
        Seam("Accelerator.skip_first_batches", (Takes("dataloader", "num_batches"),)),
    ),
)


# Latents in caches.


def _refuse_plain_caching(seam: Replaced, self: Any, *arguments: Any, **more: Any) -> None:
    raise ConfigError(
        "this trainer caches latents without a caching strategy, and kohya_bucket checks nothing of such a cache: "
        "leave --cache_latents out, or train with a newer trainer"
    )


def _new_cache_latents(seam: Replaced, self: objects.Dataset, model: Any, accelerator: Any) -> None:
    from kohya_bucket.trainers.sdscripts.caching.latents import cache_latents
    from kohya_bucket.trainers.sdscripts.caching.text import ahead

    if ahead.asked:
        return
    strategy: objects.LatentsStrategy | None = seam.door.owners.named(_STRATEGY).get_strategy()
    if strategy is None:
        seam.original(self, model, accelerator)  # it says what is wrong
        return
    load = seam.door.owners.named(_LOAD)
    with extra_sizes.caching_all_sizes(self):
        cache_latents(self, strategy, model, accelerator, load, seam.door.options())


def _encoding_loop() -> Any:
    """The one that runs now."""
    encode = loaded("encode")
    return encode and encode.EncodingLoop.current


def _load_for_caching(seam: Replaced, image_infos: Any, use_alpha_mask: Any, random_crop: Any) -> Any:
    loop = _encoding_loop()
    ready = None if loop is None else loop.loaded(image_infos)
    return seam.original(image_infos, use_alpha_mask, random_crop) if ready is None else ready


def _clean_memory(seam: Replaced, device: Any) -> None:
    if _encoding_loop() is None:  # after each batch it takes longer than the batch
        seam.original(device)


def _pixels(theirs: Any) -> Iterator[tuple[str, ...]]:
    """A picture by each filter, smaller and larger; without OpenCV sd-scripts' own filters differ."""
    picture = sample_picture()
    for resized, bucket in (((42, 28), (40, 28)), ((90, 60), (90, 48)), ((60, 40), (48, 40)), ((60, 41), (48, 40))):
        answers = {name: theirs(False, picture, bucket, resized, name)[0] for name in INTERPOLATIONS[1:]}
        answers["auto"] = theirs(False, picture, bucket, resized)[0]
        for name, answer in answers.items():
            expected = resize_and_crop(picture, resized, bucket, name)
            yield f"60x40 to {resized} by {name}", *map(checksum, (answer, expected))


def _trim(
    seam: Replaced, random_crop: bool, image: Any, reso: Any, resized_size: Any, *args: Any, **more: Any
) -> tuple[Any, Any, Any]:
    (height, width), (resized_width, resized_height) = image.shape[:2], resized_size
    # Every rule scales an image by one factor and rounds each side; where metadata states its size, `plan` names it.
    is_other = 2 * abs(resized_width * height - resized_height * width) > width + height
    if is_other and not getattr(resized_size, "is_stated", False):
        raise UnreadableImageError(
            f"{width}x{height} pixels now, which is another shape than when its bucket was chosen: start again, if it "
            "was edited"
        )
    crop = getattr(resized_size, "crop", None)
    if crop is None:
        return seam.original(random_crop, image, reso, resized_size, *args, **more)  # type: ignore[no-any-return]
    resized, original_size, _ = seam.original(False, image, resized_size, resized_size, *args, **more)
    (left, top), (width, height) = crop, reso
    return resized[top : top + height, left : left + width], original_size, resized_size.crop_ltrb(reso)


_CALLED = ("get_strategy", "get_latents_npz_path", "is_disk_cached_latents_expected", "cache_batch_latents")
_ARRAYS = ("npz_path", "latents_tensor", "original_size", "crop_ltrb", "flipped_latents_tensor", "alpha_mask")


_LOAD = "load_images_and_masks_for_caching"
_STRATEGY, _PLAIN = "LatentsCachingStrategy", "BaseDataset.cache_latents"  # the plain one went with 0.11

CACHING = SeamGroup(
    "caching",
    "latents are cached by sd-scripts' own code",
    (
        Seam(
            "trim_and_resize_if_required",
            (TakesAmong("random_crop", "image", "reso", "resized_size"), Behaves(_pixels)),
            _trim,
        ),
        *where(lambda owners: owners.has(_PLAIN), Seam(_PLAIN, (), _refuse_plain_caching)),
        Seam(
            "BaseDataset.new_cache_latents",
            (Uses("image_data", "image_to_subset", "latents_npz", "bucket_reso", *_CALLED),),
            _new_cache_latents,
        ),
        Seam(_LOAD, (), _load_for_caching),
        Seam("clean_memory_on_device", (), _clean_memory),
        Seam(_STRATEGY, (Offers(objects.LatentsStrategy),)),
        Seam(f"{_STRATEGY}.get_strategy", (Takes("cls"),)),
        Seam(f"{_STRATEGY}.get_latents_npz_path", (Takes("absolute_path", "image_size"),)),
        Seam(
            f"{_STRATEGY}.is_disk_cached_latents_expected",
            (Takes("bucket_reso", "npz_path", "flip_aug", "alpha_mask"),),
        ),
        Seam(f"{_STRATEGY}.cache_batch_latents", (Takes("model", "batch", "flip_aug", "alpha_mask", "random_crop"),)),
        Seam(f"{_STRATEGY}.save_latents_to_disk", (Takes(*_ARRAYS, "key_reso_suffix"),)),
        Seam(f"{_STRATEGY}.load_latents_from_disk", (Takes("npz_path", "bucket_reso"),)),
    ),
)


# Outputs of text encoders in caches.


_TEXT_CACHING, _TOKENIZING = "TextEncoderOutputsCachingStrategy", "TokenizeStrategy"


def _new_cache_text_encoder_outputs(seam: Replaced, self: objects.Dataset, models: Any, accelerator: Any) -> None:
    from kohya_bucket.trainers.sdscripts.caching.text import cache_text_outputs

    named = seam.door.owners.named
    strategies = [named(name).get_strategy() for name in (_TEXT_CACHING, _TOKENIZING)]
    cache_text_outputs(self, seam.original, strategies, models, accelerator)


TEXT_CACHING = SeamGroup(
    "text-caching",
    "text-encoder outputs are cached by sd-scripts' own code",
    (
        Seam("ImageInfo", (Offers(objects.DroppedRecord),)),
        Seam(
            "BaseDataset.new_cache_text_encoder_outputs",
            (Uses("image_data", "get_outputs_npz_path", "cache_batch_outputs", "text_encoder_outputs_npz"),),
            _new_cache_text_encoder_outputs,
        ),
        Seam(_TEXT_CACHING, (Offers(objects.TextStrategy),)),
        *(Seam(f"{kind}.get_strategy", (Takes("cls"),)) for kind in (_TEXT_CACHING, _TOKENIZING)),
        Seam(f"{_TEXT_CACHING}.get_outputs_npz_path", (Takes("image_abs_path"),)),
        Seam(f"{_TEXT_CACHING}.is_disk_cached_outputs_expected", (Takes("npz_path"),)),
    ),
)


SUBJECTS = (OBJECTS, BUCKETS, BATCHES, CONFIG, LOADING, CACHING, TEXT_CACHING, RESUMING)
