"""For which version of sd-scripts a command reads configs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from kohya_bucket.errors import ConfigError

if TYPE_CHECKING:
    from kohya_bucket.sdscripts.config import Release

__all__ = ["release_at_hand"]

_VERSION = re.compile(r"v?\d+(\.\w+)*|main")


def release_at_hand(given: str | None) -> tuple[Release, Path | None]:
    """The version or checkout that `--sd-scripts` names; by default the checkout at hand, or else the newest version.

    Returns:
        the version; the checkout, where it is one.

    Raises:
        ConfigError: it names neither.
    """
    from kohya_bucket.sdscripts.checkout import CheckoutError, find_checkout, nearby_checkout
    from kohya_bucket.sdscripts.config import NEWEST, Release

    if given is None:
        found = nearby_checkout()
        return (Release.in_checkout(found), found) if found else (NEWEST, None)
    if _VERSION.fullmatch(given):
        return Release.of(given), None
    try:
        found = find_checkout(Path(given))
    except CheckoutError as error:
        raise ConfigError(f"--sd-scripts is {given!r}, but must be a version such as 0.11.1, or: {error}") from error
    return Release.in_checkout(found), found
