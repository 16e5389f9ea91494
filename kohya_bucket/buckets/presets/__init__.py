"""Bucket sets that come with the package, one TOML file each; every file names its source."""

from __future__ import annotations

from importlib import resources

import toml

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.set_files import parse_bucket_set
from kohya_bucket.checks import one_of
from kohya_bucket.errors import ConfigError

__all__ = ["list_presets", "load_preset"]


def list_presets() -> list[str]:
    """Names that `load_preset` takes, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name[: -len(".toml")] for f in files if f.name.endswith(".toml"))


def load_preset(name: str) -> BucketSet:
    """The bucket set of a bundled preset.

    Raises:
        ConfigError: no preset has that name; the message lists those that exist.
    """
    one_of("preset", name, list_presets(), ConfigError)
    text = (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
    return parse_bucket_set(toml.loads(text), f"preset {name}")
