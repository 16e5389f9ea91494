"""A checkout of anima_lora, and the permanent door in it."""

from __future__ import annotations

from pathlib import Path

from kohya_bucket.trainers.door.checkout_patch import CheckoutError, CheckoutPatch
from kohya_bucket.trainers.sdscripts.checkout import is_anima_lora


def find_checkout(folder: Path) -> Path:
    """The anima_lora checkout at `folder`."""
    if is_anima_lora(folder / "library") and (folder / "train.py").is_file():
        return folder
    raise CheckoutError(f"{folder} is not an anima_lora checkout: it has no library/anima/ beside train.py")


PATCH = CheckoutPatch(
    trainer="anima_lora",
    door="kohya_bucket.trainers.anima_lora",
    find=find_checkout,
    file="library/__init__.py",
    makes_datasets="library.config.loader",
    imports=("library.config.loader",),
)
"""The permanent door: a marked block in `library/__init__.py`."""
