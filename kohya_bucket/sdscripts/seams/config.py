"""The dataset config, in which the adapter's own table stands."""

from __future__ import annotations

from typing import Any

from kohya_bucket.adapter.seams import Owners, Place, Seam, Subject

__all__ = ["CONFIG"]


def _sanitize_user_config(place: Place, self: Any, user_config: dict[str, Any], **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = place.original(self, place.door.read_options(user_config), **more)
    return result


def _seams(owners: Owners) -> tuple[Seam, ...]:
    return (Seam("ConfigSanitizer.sanitize_user_config", (), _sanitize_user_config),)


CONFIG = Subject("config", "the dataset config", _seams, orders_epochs=True)
