"""The dataset config, in which the adapter's own table stands."""

from __future__ import annotations

import functools
from typing import Any

from kohya_bucket.adapter.seams import Door, Owners, Seam, Subject
from kohya_bucket.adapter.shapes import Takes

__all__ = ["CONFIG"]


def _sanitize_user_config(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def sanitize_user_config(self: Any, user_config: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = original(self, door.read_options(user_config))
        return result

    return sanitize_user_config


def _seams(owners: Owners) -> tuple[Seam, ...]:
    return (Seam("ConfigSanitizer.sanitize_user_config", (Takes("user_config"),), _sanitize_user_config),)


CONFIG = Subject("config", "the dataset config", _seams, orders_epochs=True)
