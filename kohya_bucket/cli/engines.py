"""What `--engine` may say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.errors import KohyaBucketError

if TYPE_CHECKING:
    from kohya_bucket.images.parallel import Engine

__all__ = ["ENGINE_HELP", "engine_of"]

ENGINE_HELP = "local, or ray: Ray Data, for many machines."
_ENGINES: dict[str, Engine] = {"local": "auto", "ray": "ray"}


def engine_of(name: str) -> Engine:
    """The scan's engine. `KohyaBucketError` for another name."""
    if name not in _ENGINES:
        raise KohyaBucketError(f"--engine {name}: use one of {', '.join(_ENGINES)}")
    return _ENGINES[name]
