"""The permanent door: a marked block in a checkout's `src/musubi_tuner/__init__.py`, an empty file in every release."""

from __future__ import annotations

from pathlib import Path

from kohya_bucket.adapter.checkout_patch import CheckoutPatch
from kohya_bucket.adapter.marked_block import CheckoutError

__all__ = ["PATCH", "find_checkout"]

_DATA = Path("src", "musubi_tuner", "dataset", "image_video_dataset.py")


def find_checkout(folder: Path) -> Path:
    """The musubi-tuner checkout at `folder`, or in its `musubi-tuner`."""
    for candidate in (folder, folder / "musubi-tuner"):
        if (candidate / _DATA).is_file():
            return candidate
    raise CheckoutError(
        f"{folder} is not a musubi-tuner checkout: neither it nor its musubi-tuner folder has {_DATA.as_posix()}; name "
        "the folder that src lies in"
    )


PATCH = CheckoutPatch(
    trainer="musubi-tuner",
    door="kohya_bucket.musubi",
    find=find_checkout,
    file="src/musubi_tuner/__init__.py",
    trains='any("_train" in word for word in sys.orig_argv if word.endswith(".py") or "musubi_tuner." in word)',
    imports=("musubi_tuner.dataset.config_utils",),
    import_folder="src",
)
