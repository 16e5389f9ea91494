"""`install()` and `uninstall()`: replaces sd-scripts' bucket code when, and only when, all of it is known.

If sd-scripts is imported already it is changed at once, otherwise as soon as its `library.train_util` and
`library.config_util` are imported, whichever comes first. Calling `install()` again changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from kohya_bucket.sdscripts.one_line import one_line
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
    from torch.utils.data import DataLoader

    from kohya_bucket.sdscripts import stand_ins
    from kohya_bucket.sdscripts.resume import Run

    names = seams.check_seams(train_util, config_util, DataLoader)
    _state.settings = _read_settings()
    run = Run()
    replaced = [
        *stand_ins.for_buckets(train_util, _settings),
        *stand_ins.for_batches(train_util),
        *stand_ins.for_caching(train_util, _settings),
        *stand_ins.for_config(config_util, _take_settings),
        *stand_ins.for_loading(train_util, DataLoader, run),
    ]
    for owner, name, replacement in replaced:
        _state.originals.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, replacement)
    if not _state.quiet and is_first_process():
        lines = [
            f"kohya_bucket in sd-scripts {seams.describe_checkout(train_util)}",
            f"{len(names)} seams checked; replaced:",
        ]
        lines += [f"  {getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in replaced]
        logger.info("\n".join(lines))


def _settings() -> AdapterSettings:
    """Those of the dataset config that was read last."""
    return _state.settings


def _take_settings(user_config: dict[str, Any]) -> dict[str, Any]:
    """Read the `[kohya_bucket]` table, and return the config without it: sd-scripts refuses unknown tables."""
    table: Mapping[str, Any] | None = user_config.get(TABLE) if isinstance(user_config, dict) else None
    _state.settings = _read_settings(*([("dataset config", table)] if table is not None else []))
    return {key: value for key, value in user_config.items() if key != TABLE} if table is not None else user_config


def _read_settings(*tables: tuple[str, Mapping[str, Any]]) -> AdapterSettings:
    """The environment's file under the given tables."""
    with one_line():
        return AdapterSettings.from_tables(*environment_table(), *tables)
