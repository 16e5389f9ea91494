"""A checkout of ai-toolkit, and the permanent door in its folder for extensions."""

from __future__ import annotations

from pathlib import Path

from kohya_bucket.trainers.door.checkout_patch import CheckoutError, CheckoutPatch


def find_checkout(folder: Path) -> Path:
    """The ai-toolkit checkout at `folder`."""
    if (folder / "toolkit" / "data_loader.py").is_file() and (folder / "run.py").is_file():
        return folder
    raise CheckoutError(f"{folder} is not an ai-toolkit checkout: it has no toolkit/data_loader.py beside run.py")


PATCH = CheckoutPatch(
    trainer="ai-toolkit",
    door="kohya_bucket.trainers.ai_toolkit",
    find=find_checkout,
    file="extensions/kohya_bucket/__init__.py",
    makes_datasets="toolkit.data_loader",
    imports=("toolkit.data_loader",),
    is_ours=True,
)
"""The permanent door: an extension of ours, which every job imports before it makes its datasets, those that its web
page starts too; its git ignores that folder."""
