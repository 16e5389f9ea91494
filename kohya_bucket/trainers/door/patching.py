"""Replacing what a trainer's modules define: when they are imported, everywhere it is bound, and taken back whole."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

_ABSENT = object()
Belongs = Callable[[ModuleType], bool]


@dataclass(frozen=True)
class Replacement:
    """`value` in place of what `owner`, a class or a module, has under `name`."""

    owner: Any
    name: str
    value: Any


@dataclass
class Patches:
    """What is replaced at the moment."""

    _originals: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._originals)

    def apply(self, replacements: Sequence[Replacement], belongs: Belongs) -> None:
        """Put everything in its place.

        Args:
            replacements: what to replace.
            belongs: whether a module is the trainer's. A function or class of a module is replaced in each of these
                that has bound it, under whatever name: `from module import name` makes a binding of its own.
        """
        for replacement in replacements:
            original = vars(replacement.owner).get(replacement.name, _ABSENT)
            self._set(replacement.owner, replacement.name, replacement.value, original)
            if isinstance(replacement.owner, ModuleType) and original is not _ABSENT:
                for module, name in list(bindings_of(original, belongs)):
                    self._set(module, name, replacement.value, original)

    def take_back(self, only: Collection[Any] | None = None) -> None:
        """Everything as it was, or what has been replaced by these values."""
        kept = []
        for owner, name, original, value in reversed(self._originals):
            if only is not None and not any(value is replaced for replaced in only):
                kept.append((owner, name, original, value))
            elif original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals[:] = reversed(kept)

    def _set(self, owner: Any, name: str, value: Any, original: Any) -> None:
        self._originals.append((owner, name, original, value))
        setattr(owner, name, value)


def bindings_of(value: Any, belongs: Belongs) -> Iterator[tuple[ModuleType, str]]:
    """(module, name) wherever a trainer's module has `value` in its namespace."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and belongs(module):
            for name, bound in list(vars(module).items()):
                if bound is value:
                    yield module, name


class ImportWatch(importlib.abc.MetaPathFinder):
    """Lets the ordinary import system load some modules, and says when they are whole.

    Args:
        watches: whether a module of this full name is of interest.
        then: called when a watched module, and every watched one that was importing it, has run to its end: only then
            is nothing half made.
    """

    def __init__(self, watches: Callable[[str], bool], then: Callable[[], None]) -> None:
        self._watches = watches
        self._then = then
        self._depth = 0
        self._looking = False

    def start(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._looking or not self._watches(fullname):
            return None
        self._looking = True  # the other finders are asked, and this one with them
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def execute(self, loader: Any, module: ModuleType) -> None:
        """Run a module, and report when it was the outermost."""
        self._depth += 1
        try:
            loader.exec_module(module)
        finally:
            self._depth -= 1
        if not self._depth and self in sys.meta_path:
            self._then()


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, watch: ImportWatch) -> None:
        self._inner = inner
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:  # what asks a module for its loader gets the true one
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._watch.execute(self._inner, module)
