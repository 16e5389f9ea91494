"""What is put in the place of sd-scripts' functions and methods, by subject: (owner, name, stand-in) of each.

Stand-ins only hand over: what they do is in `replacements`, `caching`, `loader` and `resume`. Settings are asked for
when they are needed, since sd-scripts reads its dataset config after the stand-ins are in place.
"""

from __future__ import annotations

import functools
import glob
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kohya_bucket.sdscripts import caching, loader, one_size, replacements, text_caching, variants
from kohya_bucket.sdscripts.latent_cache import architecture_of
from kohya_bucket.sdscripts.manager import BucketManager
from kohya_bucket.sdscripts.one_line import one_line
from kohya_bucket.sdscripts.resume import Run
from kohya_bucket.sdscripts.settings import AdapterSettings
from kohya_bucket.sdscripts.tables import BatchTable, PlannedBatch

__all__ = ["StandIn", "for_batches", "for_buckets", "for_caching", "for_config", "for_loading"]

StandIn = tuple[Any, str, Any]
Settings = Callable[[], AdapterSettings]


def for_buckets(train_util: ModuleType, settings: Settings) -> list[StandIn]:
    """Files, their sizes, and the bucket of each."""
    base, group, control = train_util.BaseDataset, train_util.DatasetGroup, train_util.ControlNetDataset
    make_entry = train_util.BucketBatchIndex
    original_glob, original_control = train_util.glob_images, control.make_buckets

    @functools.wraps(original_glob)
    def glob_images(directory: str, base: str = "*") -> list[str]:
        if base != "*" or glob.has_magic(directory):
            found: list[str] = original_glob(directory, base)
            return found
        return replacements.list_images(directory, train_util.IMAGE_EXTENSIONS)

    @functools.wraps(base.get_image_size)
    def get_image_size(self: Any, image_path: str) -> tuple[int, int]:
        return replacements.get_image_size(self, image_path)

    @functools.wraps(base.make_buckets)
    def make_buckets(self: Any) -> None:
        with one_line():
            replacements.make_buckets(self, settings(), make_entry)

    @functools.wraps(original_control)
    def make_control_buckets(self: Any) -> None:
        original_control(self)
        self.num_train_images = self.dreambooth_dataset_delegate.num_train_images

    def get_resolutions(self: Any) -> list[tuple[int, int]]:
        return replacements.get_resolutions(self, settings())

    return [
        (train_util, "BucketManager", BucketManager),
        (train_util, "glob_images", glob_images),
        (base, "get_image_size", get_image_size),
        (base, "make_buckets", make_buckets),
        (control, "make_buckets", make_control_buckets),
        *([(group, "get_resolutions", get_resolutions)] if hasattr(group, "get_resolutions") else []),
    ]


def for_batches(train_util: ModuleType) -> list[StandIn]:
    """The order of an epoch, and the batch at a place in it."""
    base, group = train_util.BaseDataset, train_util.DatasetGroup
    original_shuffle = base.shuffle_buckets

    @functools.wraps(original_shuffle)
    def shuffle_buckets(self: Any) -> None:
        if not isinstance(self.buckets_indices, BatchTable):
            original_shuffle(self)

    @functools.wraps(base.set_current_epoch)
    def set_current_epoch(self: Any, epoch: int) -> None:
        replacements.set_current_epoch(self, epoch)

    def group_getitem(self: Any, index: int) -> Any:
        if isinstance(index, PlannedBatch):
            return replacements.planned_item(self, index)
        tables = [getattr(dataset, "buckets_indices", None) for dataset in self.datasets]
        if all(isinstance(table, BatchTable) and table.settings.several_sizes for table in tables):
            with one_line():
                return replacements.numbered_item(self, index)
        return super(group, self).__getitem__(index)

    return [
        (base, "shuffle_buckets", shuffle_buckets),
        (base, "set_current_epoch", set_current_epoch),
        (group, "__getitem__", group_getitem),
    ]


def for_caching(train_util: ModuleType, settings: Settings) -> list[StandIn]:
    """Latents and text-encoder outputs; sd-scripts 0.9 has no strategies for them."""
    base = train_util.BaseDataset
    group = train_util.DatasetGroup
    original_plain, original_group = base.cache_latents, group.cache_latents
    original_latents: Any = getattr(base, "new_cache_latents", None)
    original_text: Any = getattr(base, "new_cache_text_encoder_outputs", None)

    @functools.wraps(original_plain)
    def cache_latents(self: Any, vae: Any, vae_batch_size: int = 1, cache_to_disk: bool = False, *args: Any) -> None:
        with one_line(), variants.caching_all_sizes(self, to_disk=cache_to_disk, by_strategy=False):
            original_plain(self, vae, vae_batch_size, cache_to_disk, *args)

    @functools.wraps(original_group)
    def cache_group(
        self: Any, vae: Any, vae_batch_size: int = 1, cache_to_disk: bool = False, *args: Any, **more: Any
    ) -> None:
        if cache_to_disk:
            with one_line():
                one_size.check_one_size_each(self.datasets)
        original_group(self, vae, vae_batch_size, cache_to_disk, *args, **more)

    def new_cache_latents(self: Any, model: Any, accelerator: Any) -> None:
        strategy = train_util.LatentsCachingStrategy.get_strategy()
        to_disk = bool(strategy is not None and strategy.cache_to_disk)
        known = strategy is not None and architecture_of(strategy.cache_suffix) is not None
        with one_line(), variants.caching_all_sizes(self, to_disk=to_disk, by_strategy=known):
            caching.cache_latents(self, original_latents, strategy, model, accelerator, settings())

    def new_cache_text_encoder_outputs(self: Any, models: Any, accelerator: Any) -> None:
        strategy = train_util.TextEncoderOutputsCachingStrategy.get_strategy()
        with one_line():
            text_caching.cache_text_outputs(self, original_text, strategy, models, accelerator)

    plain = [(base, "cache_latents", cache_latents), (group, "cache_latents", cache_group)]
    if original_latents is None:
        return plain
    return [
        *plain,
        (base, "new_cache_latents", new_cache_latents),
        (base, "new_cache_text_encoder_outputs", new_cache_text_encoder_outputs),
    ]


def for_config(config_util: ModuleType, take_settings: Callable[[dict[str, Any]], dict[str, Any]]) -> list[StandIn]:
    """The dataset config; `take_settings` returns it without what is not sd-scripts' own."""
    sanitizer = config_util.ConfigSanitizer
    original_sanitize = sanitizer.sanitize_user_config

    @functools.wraps(original_sanitize)
    def sanitize_user_config(self: Any, user_config: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = original_sanitize(self, take_settings(user_config))
        return result

    return [(sanitizer, "sanitize_user_config", sanitize_user_config)]


def for_loading(train_util: ModuleType, data_loader: Any, run: Run) -> list[StandIn]:
    """The accelerator, whose states remember the place in an epoch, and the loaders of dataset groups."""
    group = train_util.DatasetGroup
    original_prepare, original_init = train_util.prepare_accelerator, data_loader.__init__
    signature = inspect.signature(original_init)

    @functools.wraps(original_prepare)
    def prepare_accelerator(args: Any) -> Any:
        accelerator = original_prepare(args)
        run.watch(accelerator, args)
        return accelerator

    @functools.wraps(original_init)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        planned = loader.planned_arguments(signature, group, run, *args, **kwargs)
        if planned is None:
            original_init(self, *args, **kwargs)
        else:
            original_init(self, **planned)

    return [(train_util, "prepare_accelerator", prepare_accelerator), (data_loader, "__init__", init_loader)]
