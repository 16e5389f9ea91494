"""Which of the imported modules is sd-scripts'."""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["PACKAGE", "home_module"]

PACKAGE = "library"  # holds sd-scripts' code; other projects have packages of this name too
_HOME = "BaseDataset"
_METHODS = ("make_buckets", "shuffle_buckets", "register_image")  # any of them tells it from another project's


def home_module() -> ModuleType | None:
    """The module that defines the base class of sd-scripts' data sets; None while it is not imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{PACKAGE}.") and isinstance(module, ModuleType):
            base = vars(module).get(_HOME)
            if getattr(base, "__module__", None) == name and any(hasattr(base, name) for name in _METHODS):
                return module
    return None
