"""Where musubi-tuner is held on to."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

from kohya_bucket.adapter.batches import PlannedBatch
from kohya_bucket.adapter.config_source import load_source
from kohya_bucket.adapter.door import Place, Seam, Subject, TrainerDoor, calling_frame
from kohya_bucket.adapter.patching import Replacement
from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.adapter.resume import Accelerator
from kohya_bucket.adapter.shapes import Behaves, Inherits, Offers, Takes, Uses, parameters_of
from kohya_bucket.errors import ConfigError
from kohya_bucket.musubi.architectures import ARCHITECTURES
from kohya_bucket.musubi.batches import planned_item
from kohya_bucket.musubi.cache_seams import CACHING, clip_selector
from kohya_bucket.musubi.keys import CLIPS, DEPRECATED, IMAGES, ClipKeys, DatasetKeys
from kohya_bucket.musubi.objects import BatchManager, Dataset, Group, Item

logger = logging.getLogger("kohya_bucket")


def _group_item(place: Place, self: Group, index: Any, /) -> Any:
    return planned_item(self, index) if isinstance(index, PlannedBatch) else place.original(self, index)


def _sanitize(place: Place, self: Any, user_config: dict[str, Any], **more: Any) -> Any:
    user_config = place.door.read_options(user_config)
    try:
        return place.original(self, user_config, **more)
    except Exception as error:  # it names neither keys nor what to do, and ends in a traceback
        raise ConfigError(
            f"musubi-tuner refuses the dataset config: {error}; `kohya-bucket plan` names each mistake in it"
        ) from error


def _load(place: Place, file: str, **more: Any) -> Any:
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
        _mend(calling_frame(), place.door)
    return place.original(dataset_group_blueprint, training, **more)


# What hv_train.py lacks to train at all. It was not changed along with the data sets: it tells them of no epoch, calls
# its collator with a step that its own definition does not take, takes a batch for four tensors, and saves with options
# that its parser does not have.

_COLLATOR = "collator_class"
_PARTS = ("latents", "llm", "llm_mask", "clipL")
_SAVES_WITH = ("metadata_reso", "metadata_arch")


def _mend(program: FrameType, door: TrainerDoor) -> None:
    """Mend a program that asks for its data sets without telling them of an epoch; others are left as they are."""
    module = sys.modules.get(program.f_globals["__name__"])
    own = getattr(module, _COLLATOR, None)
    if module is None or getattr(own, "__module__", "") != module.__name__:
        return
    if parameters_of(own) != ["epoch", "dataset"]:
        return
    door.patches.apply([Replacement(module, _COLLATOR, _WithStep)], lambda _: False)
    arguments = program.f_locals.get("args")
    for name in _SAVES_WITH:
        if arguments is not None and not hasattr(arguments, name):
            setattr(arguments, name, None)


class _WithStep:
    """In place of a collator that a program defines without the step, and may call with it."""

    def __init__(self, epoch: Any, *step_and_dataset: Any) -> None:
        self.current_epoch = epoch
        self.takes_parts = len(step_and_dataset) > 1
        if self.takes_parts and is_first_process():
            logger.info("hv_train.py is mended: its collator, its batches, and the options that it saves with")


def handing_over(collator: Any) -> Any:
    """What replaces a trainer's collator, which insists on an epoch that its data sets count themselves."""
    return _parts_of_first if getattr(collator, "takes_parts", False) else _first


def _first(examples: list[Any]) -> Any:
    return examples[0]


def _parts_of_first(examples: list[Any]) -> tuple[Any, ...]:
    return tuple(examples[0][name] for name in _PARTS)


_GROUP_KEYS = ("dataset_group_blueprint", "training", "num_timestep_buckets", "shared_epoch", "audio_spec")
_OF_RUN = ("debug_dataset", "architecture")
_MANAGER = "BucketBatchManager"
_ORDER = (
    Seam("DatasetGroup", (Inherits("__getitem__", "__len__"), Offers(Group))),
    Seam("DatasetGroup.__getitem__", (), _group_item),
    Seam("ImageDataset", (Offers(Dataset),)),
    Seam("VideoDataset", (Offers(Dataset),)),
    Seam("ItemInfo", (Offers(Item),)),
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
_RESUMING = (Seam("Accelerator", (Offers(Accelerator),)), Seam("Accelerator.__init__", (), _make_accelerator))
_WEIGHING = (Seam("Accelerator.backward", (), _backward),)

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
    placement = keys.picture_rule(ARCHITECTURES[family]).place(sizes)
    how = f"enable_bucket = {keys.enable_bucket}, bucket_no_upscale = {keys.bucket_no_upscale}"
    for size, expected in zip(sizes, placement.bucket_sizes.tolist(), strict=True):
        answer = tuple(selector.get_bucket_resolution(size))
        yield f"{size[0]}x{size[1]} for {family} ({how})", answer, tuple(expected)


_PLANNING = (
    Seam("BucketSelector", (Behaves(_placements),)),
    Seam("VideoDataset.retrieve_latent_cache_batches", (Behaves(_clips),)),
)

SUBJECTS = (
    Subject("order", "epochs are musubi-tuner's own", _ORDER, orders_epochs=True),
    Subject("resuming", "a run that is resumed begins its epoch anew", _RESUMING),
    Subject("weighing", "items of a batch that is shorter than another process' count for more", _WEIGHING),
    CACHING,
    Subject("planning", "`kohya-bucket plan` may show other buckets than those that are cached", _PLANNING),
)
