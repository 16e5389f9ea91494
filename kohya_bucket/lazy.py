"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kohya_bucket.extras import pip_install

_EXTRA_OF = {"kohya_bucket.datasets": "torch", "kohya_bucket.latents": "train"}


def importer(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A `__getattr__` for the module `package`, from the names that each module is the home of.

    What it returns raises an ImportError that says what to install where a package of an extra is missing.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as missing:
            extra = next((e for prefix, e in _EXTRA_OF.items() if home.startswith(prefix)), None)
            if extra is None or (missing.name or "").startswith("kohya_bucket"):
                raise
            absent = (missing.name or "").split(".")[0]
            raise ImportError(f"{name} needs {absent}, which is not installed: {pip_install(extra)}") from missing

    return get
