"""Bucket sets in files: TOML or JSON with `name`, `description`, `vae_factor` and a list `buckets`; and the presets.

    name = "my-budget"
    vae_factor = 8

    [[buckets]]
    width = 768
    height = 768

The format is the one that bucketsampler reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import toml

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.checks import one_of
from kohya_bucket.errors import ConfigError, InvalidBucketError, KohyaBucketError
from kohya_bucket.texts import each_name_once, parse_json, parse_toml, read_text

_PRESETS = resources.files("kohya_bucket.buckets") / "presets"  # one TOML file each; every file names its source
_SET_KEYS = {"name": str, "description": str, "vae_factor": int, "buckets": list}


def load_from_toml(path: str | Path) -> BucketSet:
    """Read a bucket set from a TOML file.

    Raises:
        FileNotFoundError: no such file.
        ConfigError: a folder, pipe or device, no UTF-8 text, no TOML, or a key that does not belong there or
            is missing.
        InvalidBucketError: an empty set, a duplicate, a side that is not positive or no multiple.
    """
    return _load(path, "TOML", parse_toml)


def load_from_json(path: str | Path) -> BucketSet:
    """Read a bucket set from a JSON file; raises as `load_from_toml` does."""
    return _load(path, "JSON", partial(parse_json, object_of=each_name_once))


def _load(path: str | Path, kind: str, parse: Callable[[str], Any]) -> BucketSet:
    try:
        data = parse(read_text(path, want="a bucket set is a TOML or JSON file"))
    except KohyaBucketError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {kind}: {error}") from error
    return parse_bucket_set(data, str(path))


def parse_bucket_set(data: Any, source: str) -> BucketSet:
    """Check a decoded file and build its set; `source` names it in errors."""
    if not isinstance(data, dict):
        raise ConfigError(f"{source} holds a {type(data).__name__}, but a bucket set is a table with a list 'buckets'")
    for key, value in data.items():
        if key not in _SET_KEYS:
            raise ConfigError(
                f"{source} has the key {key!r}, which does not exist there; known: {', '.join(_SET_KEYS)}"
            )
        if not isinstance(value, _SET_KEYS[key]) or isinstance(value, bool):
            raise ConfigError(f"{source}: {key} is {value!r}, but must be a {_SET_KEYS[key].__name__}")
    if "buckets" not in data:
        raise ConfigError(f"{source} has no [[buckets]]: give one table with width and height for each bucket")
    dims = []
    for i, entry in enumerate(data["buckets"], start=1):
        if not isinstance(entry, dict) or set(entry) != {"width", "height"}:
            raise ConfigError(f"{source}: bucket {i} is {entry!r}, but must have exactly width and height")
        if any(isinstance(side, bool) or not isinstance(side, int) for side in entry.values()):
            raise InvalidBucketError(
                f"{source}: bucket {i} is {entry['width']!r}x{entry['height']!r}, but both sides must be whole numbers"
            )
        dims.append((entry["width"], entry["height"]))
    try:
        return BucketSet.from_dims(dims, **{key: value for key, value in data.items() if key != "buckets"})
    except InvalidBucketError as error:
        raise InvalidBucketError(f"{source}: {error}") from error


def bucket_set_to_toml(bucket_set: BucketSet) -> str:
    """The set as TOML text that `load_from_toml` reads back equal."""
    head = {key: getattr(bucket_set, key) for key in ("name", "description", "vae_factor")}
    parts = [toml.dumps({key: value for key, value in head.items() if value != ""})]
    parts += [f"[[buckets]]\nwidth = {b.width}\nheight = {b.height}\n" for b in bucket_set]
    return "\n".join(parts)


def list_presets() -> list[str]:
    """Names that `load_preset` takes, sorted.

    Examples:
        >>> list_presets()
        ['flux', 'novelai', 'qwen-image', 'sd15', 'sd3', 'sdxl', 'sdxl-1024', 'sdxl-report']
    """
    return sorted(file.name.removesuffix(".toml") for file in _PRESETS.iterdir() if file.name.endswith(".toml"))


def load_preset(name: str) -> BucketSet:
    """The bucket set of a bundled preset.

    Raises:
        ConfigError: no preset has that name; the message lists those that exist.

    Examples:
        >>> buckets = load_preset("sdxl")
        >>> len(buckets), str(buckets[0])
        (9, '1024x1024')
    """
    one_of("preset", name, list_presets(), ConfigError)
    text = (_PRESETS / f"{name}.toml").read_text(encoding="utf-8")
    return parse_bucket_set(toml.loads(text), f"preset {name}")
