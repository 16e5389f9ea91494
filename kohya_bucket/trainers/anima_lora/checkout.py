"""A checkout of anima_lora."""

from __future__ import annotations

from pathlib import Path

from kohya_bucket.trainers.sdscripts.checkout import is_anima_lora


def is_checkout(folder: Path) -> bool:
    """Whether anima_lora lies in `folder`."""
    return is_anima_lora(folder / "library") and (folder / "train.py").is_file()
