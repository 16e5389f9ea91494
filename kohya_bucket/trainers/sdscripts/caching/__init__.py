"""Caches of latents and text-encoder outputs, behind sd-scripts' own caching; loaded by a run that caches."""

import sys
from typing import Any


def loaded(module: str) -> Any:
    """A module here that this run has loaded, and None of a run that has no use for it: what it keeps is empty."""
    return sys.modules.get(f"{__name__}.{module}")
