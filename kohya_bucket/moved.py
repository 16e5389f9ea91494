"""Modules that the documentation once named, under their old names: for one version, with a warning.

Imported on the way to such a name only, since a finder asks for nothing else.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any

__all__ = ["MOVED", "answer_to_old_names"]

MOVED = {
    "kohya_bucket.buckets.auto": ("kohya_bucket.buckets.rules.auto", "kohya_bucket.buckets.rules.auto"),
    "kohya_bucket.datasets.tar_index": ("kohya_bucket.images.tar_index",),
    "kohya_bucket.images.store": ("kohya_bucket.originals.image_store",),
    "kohya_bucket.latents.diffusers_vae": ("kohya_bucket.latents.vae.diffusers_vae",),
    "kohya_bucket.latents.encoder": ("kohya_bucket.latents.vae.encoder",),
    "kohya_bucket.planning.exact_batches": ("kohya_bucket.originals.exact_batches",),
    "kohya_bucket.planning.novelai": ("kohya_bucket.originals.novelai_epochs",),
}


class _OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its old name, and has it answer with what the new ones hold."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        homes = MOVED[module.__name__]
        warnings.warn(
            f"{module.__name__} is now {' and '.join(homes)}; the old name goes with the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        for home in map(importlib.import_module, homes):
            vars(module).update({name: getattr(home, name) for name in home.__all__})


def answer_to_old_names() -> None:
    """Look for old names after all else."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
