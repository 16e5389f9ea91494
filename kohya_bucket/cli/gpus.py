"""The option `--gpus`, alike for all commands that have it."""

from __future__ import annotations

from kohya_bucket.errors import KohyaBucketError

__all__ = ["gpu_counts"]

_MOST_GPUS = 65_536


def gpu_counts(text: str) -> list[int]:
    """Numbers of GPUs from `1,2,4`. Raises `KohyaBucketError` for anything else."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > _MOST_GPUS:
        raise KohyaBucketError(f"--gpus is {text!r}, but must be whole numbers from 1 to {_MOST_GPUS:,}, e.g. 1,2,4")
    return numbers
