"""Where musubi-tuner is held on to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.vae.single_frames import fold_single_frames
from kohya_bucket.trainers.door.batches import PlannedBatch
from kohya_bucket.trainers.door.captions import refuse_broken
from kohya_bucket.trainers.door.config_source import load_source
from kohya_bucket.trainers.door.resume import RESUMING, WEIGHING
from kohya_bucket.trainers.door.seams import Replaced, Seam, SeamGroup, calling_frame, where
from kohya_bucket.trainers.door.shapes import Behaves, Inherits, Offers, Takes, Uses
from kohya_bucket.trainers.musubi.architectures import ARCHITECTURES
from kohya_bucket.trainers.musubi.batches import planned_item
from kohya_bucket.trainers.musubi.caching_seams import CACHING, ENCODING, clip_selector
from kohya_bucket.trainers.musubi.keys import CLIPS, DEPRECATED, IMAGES, SOURCES, ClipKeys, CommonKeys
from kohya_bucket.trainers.musubi.objects import BatchManager, CachedItem, Dataset, Group, ImageAutoencoder
from kohya_bucket.trainers.musubi.refusals import why_not_cached_in


def _group_item(seam: Replaced, self: Group, index: Any, /) -> Any:
    return planned_item(self, index) if isinstance(index, PlannedBatch) else seam.original(self, index)


def _sanitize(seam: Replaced, self: Any, user_config: dict[str, Any], **more: Any) -> Any:
    user_config = seam.door.read_options(user_config, calling_frame())
    try:
        return seam.original(self, user_config, **more)
    except Exception as error:  # it names neither keys nor what to do, and ends in a traceback
        raise ConfigError(
            f"musubi-tuner refuses the dataset config: {error}; `kohya-bucket plan` names each mistake in it"
        ) from error


def _load(seam: Replaced, file: str, **more: Any) -> Any:
    load_source(file, "musubi-tuner")
    return seam.original(file, **more)


def _make_group(seam: Replaced, dataset_group_blueprint: Any, training: bool = False, **more: Any) -> Any:
    if training and "shared_epoch" not in more and Path(calling_frame().f_code.co_filename).name == "hv_train.py":
        raise ConfigError(
            "hv_train.py cannot train, with this package or without: it calls its collator with one argument too many, "
            "since musubi-tuner changed its datasets and not this program; hv_train_network.py trains"
        )
    folders = []
    for one in dataset_group_blueprint.datasets:
        listed = [getattr(one.params, key, None) for key in SOURCES if key.endswith("directory")]
        folders.append(next((path for path in (one.params.cache_directory, *listed) if path is not None), None))
    for _, message, remedy in filter(None, why_not_cached_in(folders)):
        raise ConfigError(f"{message}: {remedy}")
    try:
        group = seam.original(dataset_group_blueprint, training, **more)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        sources = (getattr(one.params, key, None) for one in dataset_group_blueprint.datasets for key in SOURCES)
        lists = ", ".join(str(path) for path in sources if path is not None and os.path.isfile(path))
        raise ConfigError(f"a line of {lists} cannot be read: {error}; `kohya-bucket plan` names it") from error
    if not training:  # captions are read where they are cached
        refuse_broken(chain.from_iterable(map(caption_files, group.datasets)), "musubi-tuner")
    return group


def caption_files(dataset: Any) -> list[str]:
    """Of a dataset whose captions are in files of their own."""
    source = getattr(dataset, "datasource", None)
    ending = getattr(source, "caption_extension", None)
    paths = getattr(source, "image_paths", getattr(source, "video_paths", ()))
    return [os.path.splitext(path)[0] + ending for path in paths] if ending else []


_GROUP_KEYS = ("dataset_group_blueprint", "training", "num_timestep_buckets", "shared_epoch", "audio_spec")
_OF_RUN = ("debug_dataset", "architecture")
_MANAGER = "BucketBatchManager"
_ORDER = (
    Seam("DatasetGroup", (Inherits("__getitem__", "__len__"), Offers(Group))),
    Seam("DatasetGroup.__getitem__", (), _group_item),
    Seam("ImageDataset", (Offers(Dataset),)),
    Seam("VideoDataset", (Offers(Dataset),)),
    Seam("ItemInfo", (Offers(CachedItem),)),
    Seam(_MANAGER, (Offers(BatchManager),)),
    Seam(
        f"{_MANAGER}.__getitem__",
        (Takes("idx"), Uses("bucket_batch_indices", "buckets", "batch_size", "timestep_pool")),
    ),
    Seam("load_user_config", (), _load),
    Seam("ConfigSanitizer.sanitize_user_config", (), _sanitize),
    Seam("generate_dataset_group_by_blueprint", (), _make_group, only=_GROUP_KEYS),
    Seam("ImageDataset.__init__", only=(*IMAGES, *DEPRECATED, *_OF_RUN), defaults="ImageDatasetParams"),
    Seam("VideoDataset.__init__", only=(*CLIPS, "audio_spec", *_OF_RUN), defaults="VideoDatasetParams"),
)

_SIZES = [(w, h) for w in range(90, 1800, 211) for h in range(70, 1700, 203)]
_MODES = [(False, False), (True, False), (True, True)]


def _placements(theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Images that musubi-tuner places without a mistake: none is so narrow that a side becomes 0."""
    for family in ("wan", "ho1"):
        for enable_bucket, no_upscale in _MODES if family in theirs.ARCHITECTURE_STEPS_MAP else ():
            keys = CommonKeys((960, 544), enable_bucket, no_upscale)
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
        """A dataset that has nothing else."""


def _buckets(selector: Any, keys: CommonKeys, family: str, sizes: Any) -> Iterator[tuple[str, Any, Any]]:
    placement = keys.picture_rule(ARCHITECTURES[family]).place(sizes)
    how = f"enable_bucket = {keys.enable_bucket}, bucket_no_upscale = {keys.bucket_no_upscale}"
    for size, expected in zip(sizes, placement.bucket_sizes.tolist(), strict=True):
        answer = tuple(selector.get_bucket_resolution(size))
        yield f"{size[0]}x{size[1]} for {family} ({how})", answer, tuple(expected)


_PLANNING = (
    Seam("BucketSelector", (Behaves(_placements),)),
    Seam("VideoDataset.retrieve_latent_cache_batches", (Behaves(_clips),)),
)


def _encode_pictures(seam: Replaced, self: ImageAutoencoder, pixels: Any) -> Any:
    fold_single_frames(self.encoder)
    return seam.original(self, pixels)


def _one_frame(theirs: Any) -> Iterator[tuple[str, bool, bool]]:
    """Whether a convolution makes the same of a single frame in two dimensions as in three."""
    import torch

    for kernel, padding in ((3, 1), (1, 0)):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            convolution, frame = theirs(2, 3, kernel, padding=padding), torch.rand(1, 2, 1, 5, 4)
            before = convolution(frame)
            same = fold_single_frames(convolution) == 1 and torch.allclose(convolution(frame), before, atol=1e-6)
        yield f"a single frame with a kernel of {kernel}", same, True


_ENCODER = where(
    lambda owners: owners.has("qwen_image_autoencoder_kl"),  # the module, so that another name in it does not pass
    Seam("QwenImageCausalConv3d", (Behaves(_one_frame),)),
    Seam("AutoencoderKLQwenImage", (Offers(ImageAutoencoder),)),
    Seam("AutoencoderKLQwenImage.encode_pixels_to_latents", (Takes("pixels"), Uses("encode")), _encode_pictures),
)

SUBJECTS = (
    SeamGroup("order", "epochs are musubi-tuner's own", _ORDER, orders_epochs=True),
    SeamGroup("resuming", "a run that is resumed begins its epoch again", RESUMING),
    SeamGroup("weighing", "items of a batch that is shorter than another process' count for more", WEIGHING),
    CACHING,
    ENCODING,
    SeamGroup("encoder", "the VAE of Qwen-Image and Krea 2 encodes pictures as clips of one frame", _ENCODER),
    SeamGroup("planning", "`kohya-bucket plan` may show other buckets than those that are cached", _PLANNING),
)
