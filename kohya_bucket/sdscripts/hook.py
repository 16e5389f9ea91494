"""`install()` and `uninstall()`: replaces sd-scripts' bucket code when, and only when, all of it is known.

If sd-scripts is imported already it is changed at once, otherwise as soon as its `library.train_util` and
`library.config_util` are imported, whichever comes first. Calling `install()` again changes nothing.
"""

from __future__ import annotations

import functools
import glob
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.sdscripts.processes import is_first_process
from kohya_bucket.sdscripts.settings import TABLE, AdapterSettings, environment_table

__all__ = ["install", "is_active", "uninstall"]

_TRAIN_UTIL = "library.train_util"
_CONFIG_UTIL = "library.config_util"
_ABSENT = object()

logger = logging.getLogger("kohya_bucket")


class _State:
    """What is replaced at the moment, for taking it back."""

    def __init__(self) -> None:
        self.originals: list[tuple[Any, str, Any]] = []
        self.finder: _Finder | None = None
        self.settings = AdapterSettings()
        self.quiet = False
        self.executed: set[str] = set()


_state = _State()


def install(*, quiet: bool = False) -> None:
    """Put this package's buckets and plans behind sd-scripts' dataset classes.

    Args:
        quiet: do not list the replaced seams in the log.

    Raises:
        SeamError: sd-scripts is imported already and is not a version this adapter knows.
        ConfigError: the file named by `KOHYA_BUCKET_CONFIG` cannot be used.
    """
    _state.quiet = quiet
    if _is_loaded(_TRAIN_UTIL):
        _replace_when_complete()
    elif _state.finder is None:
        _state.finder = _Finder()
        sys.meta_path.insert(0, _state.finder)


def uninstall() -> None:
    """Restore everything that `install` replaced. Datasets made in between keep what they were given."""
    for owner, name, original in reversed(_state.originals):
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _state.originals.clear()
    if _state.finder is not None:
        sys.meta_path.remove(_state.finder)
        _state.finder = None
    _state.settings = AdapterSettings()


def is_active() -> bool:
    """Whether sd-scripts' code is replaced in this process at the moment."""
    return bool(_state.originals)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the ordinary import system load the two modules, then replaces what they defined."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in (_TRAIN_UTIL, _CONFIG_UTIL):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _state.executed.add(module.__name__)
        _replace_when_complete()


def _is_loaded(name: str) -> bool:
    """Imported to its end, not just begun."""
    module = sys.modules.get(name)
    return module is not None and (
        name in _state.executed or not getattr(getattr(module, "__spec__", None), "_initializing", False)
    )


def _replace_when_complete() -> None:
    """config_util imports train_util, so it can be half done when train_util is complete: then wait for it."""
    if _is_loaded(_TRAIN_UTIL) and (_is_loaded(_CONFIG_UTIL) or _CONFIG_UTIL not in sys.modules):
        _replace_all(sys.modules[_TRAIN_UTIL])


def _replace_all(train_util: ModuleType) -> None:
    from kohya_bucket.sdscripts import seams

    if _state.originals or not seams.is_sd_scripts(train_util):
        return
    config_util = importlib.import_module(_CONFIG_UTIL)
    if _state.originals:  # that import completed it
        return
    import torch.utils.data

    from kohya_bucket.sdscripts import caching, loader, replacements, variants
    from kohya_bucket.sdscripts.latent_cache import architecture_of
    from kohya_bucket.sdscripts.manager import BucketManager
    from kohya_bucket.sdscripts.resume import Run
    from kohya_bucket.sdscripts.tables import BatchTable, PlannedBatch

    data_loader = torch.utils.data.DataLoader
    names = seams.check_seams(train_util, config_util, data_loader)
    _state.settings = _read_settings()

    base, group, sanitizer = train_util.BaseDataset, train_util.DatasetGroup, config_util.ConfigSanitizer
    make_entry = train_util.BucketBatchIndex
    original_shuffle, original_init = base.shuffle_buckets, data_loader.__init__
    original_sanitize, original_control = sanitizer.sanitize_user_config, train_util.ControlNetDataset.make_buckets
    original_prepare, original_glob = train_util.prepare_accelerator, train_util.glob_images
    has_strategies = hasattr(base, "new_cache_latents")  # since 0.10
    original_latents: Any = getattr(base, "new_cache_latents", None)
    original_text: Any = getattr(base, "new_cache_text_encoder_outputs", None)
    original_plain = base.cache_latents
    signature = inspect.signature(original_init)
    run = Run()

    @functools.wraps(original_prepare)
    def prepare_accelerator(args: Any) -> Any:
        accelerator = original_prepare(args)
        run.watch(accelerator, args)
        return accelerator

    @functools.wraps(base.make_buckets)
    def make_buckets(self: Any) -> None:
        with _one_line():
            replacements.make_buckets(self, _state.settings, make_entry)

    def new_cache_latents(self: Any, model: Any, accelerator: Any) -> None:
        strategy = train_util.LatentsCachingStrategy.get_strategy()
        to_disk = bool(strategy is not None and strategy.cache_to_disk)
        known = strategy is not None and architecture_of(strategy.cache_suffix) is not None
        with _one_line(), variants.caching_all_sizes(self, to_disk=to_disk, by_strategy=known):
            caching.cache_latents(self, original_latents, strategy, model, accelerator, _state.settings)

    @functools.wraps(original_plain)
    def cache_latents(self: Any, vae: Any, vae_batch_size: int = 1, cache_to_disk: bool = False, *args: Any) -> None:
        with _one_line(), variants.caching_all_sizes(self, to_disk=cache_to_disk, by_strategy=False):
            original_plain(self, vae, vae_batch_size, cache_to_disk, *args)

    def new_cache_text_encoder_outputs(self: Any, models: Any, accelerator: Any) -> None:
        strategy = train_util.TextEncoderOutputsCachingStrategy.get_strategy()
        with _one_line():
            caching.cache_text_outputs(self, original_text, strategy, models, accelerator)

    def get_resolutions(self: Any) -> list[tuple[int, int]]:
        return replacements.get_resolutions(self, _state.settings)

    @functools.wraps(original_control)
    def make_control_buckets(self: Any) -> None:
        original_control(self)
        self.num_train_images = self.dreambooth_dataset_delegate.num_train_images

    @functools.wraps(original_shuffle)
    def shuffle_buckets(self: Any) -> None:
        if not isinstance(self.buckets_indices, BatchTable):
            original_shuffle(self)

    @functools.wraps(original_glob)
    def glob_images(directory: str, base: str = "*") -> list[str]:
        if base != "*" or glob.has_magic(directory):
            found: list[str] = original_glob(directory, base)
            return found
        return replacements.list_images(directory, train_util.IMAGE_EXTENSIONS)

    @functools.wraps(base.get_image_size)
    def get_image_size(self: Any, image_path: str) -> tuple[int, int]:
        return replacements.get_image_size(self, image_path)

    @functools.wraps(base.set_current_epoch)
    def set_current_epoch(self: Any, epoch: int) -> None:
        replacements.set_current_epoch(self, epoch)

    def group_getitem(self: Any, index: int) -> Any:
        if isinstance(index, PlannedBatch):
            return replacements.planned_item(self, index)
        tables = [getattr(dataset, "buckets_indices", None) for dataset in self.datasets]
        if all(isinstance(table, BatchTable) and table.settings.several_sizes for table in tables):
            with _one_line():
                return replacements.numbered_item(self, index)
        return super(group, self).__getitem__(index)

    @functools.wraps(original_sanitize)
    def sanitize_user_config(self: Any, user_config: dict[str, Any]) -> dict[str, Any]:
        rest = _take_settings(user_config)
        result: dict[str, Any] = original_sanitize(self, rest)
        return result

    @functools.wraps(original_init)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        planned = loader.planned_arguments(signature, group, run, *args, **kwargs)
        if planned is None:
            original_init(self, *args, **kwargs)
        else:
            original_init(self, **planned)

    _replace(train_util, "BucketManager", BucketManager)
    _replace(train_util, "prepare_accelerator", prepare_accelerator)
    _replace(train_util, "glob_images", glob_images)
    _replace(base, "make_buckets", make_buckets)
    _replace(base, "shuffle_buckets", shuffle_buckets)
    _replace(base, "get_image_size", get_image_size)
    _replace(base, "cache_latents", cache_latents)
    _replace(base, "set_current_epoch", set_current_epoch)
    _replace(train_util.ControlNetDataset, "make_buckets", make_control_buckets)
    _replace(group, "__getitem__", group_getitem)
    if hasattr(group, "get_resolutions"):
        _replace(group, "get_resolutions", get_resolutions)
    if has_strategies:
        _replace(base, "new_cache_latents", new_cache_latents)
        _replace(base, "new_cache_text_encoder_outputs", new_cache_text_encoder_outputs)
    _replace(sanitizer, "sanitize_user_config", sanitize_user_config)
    _replace(data_loader, "__init__", init_loader)
    if not _state.quiet and is_first_process():
        lines = [
            f"kohya_bucket in sd-scripts {seams.describe_checkout(train_util)}",
            f"{len(names)} seams checked; replaced:",
        ]
        lines += [f"  {getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in _state.originals]
        logger.info("\n".join(lines))


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _state.originals.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, replacement)


def _take_settings(user_config: dict[str, Any]) -> dict[str, Any]:
    """Read the `[kohya_bucket]` table, and return the config without it: sd-scripts refuses unknown tables."""
    table: Mapping[str, Any] | None = user_config.get(TABLE) if isinstance(user_config, dict) else None
    _state.settings = _read_settings(*([("dataset config", table)] if table is not None else []))
    return {key: value for key, value in user_config.items() if key != TABLE} if table is not None else user_config


def _read_settings(*tables: tuple[str, Mapping[str, Any]]) -> AdapterSettings:
    """The environment's file under the given tables."""
    with _one_line():
        return AdapterSettings.from_tables(*environment_table(), *tables)


@contextmanager
def _one_line() -> Iterator[None]:
    """What a user can mend ends the run with one line, not with a traceback through the trainer."""
    try:
        yield
    except KohyaBucketError as error:
        raise SystemExit(f"kohya_bucket: {error}") from error
