"""The rules that `compare` knows by name: the package's own, variants of them, and those of other trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kohya_bucket.buckets.trainers import TRAINERS, trainer_rule
from kohya_bucket.cli.rule_options import RuleOptions
from kohya_bucket.errors import ConfigError

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.buckets.sizes import IntArray

__all__ = ["COMPARABLE", "GROUPS", "compared_rule", "names_of"]

# Name -> what it changes of the options.
_OWN: Mapping[str, Mapping[str, Any]] = {
    "kohya": {},
    "kohya-no-upscale": {"rule": "kohya", "bucket_no_upscale": True},
    "kohya-largest": {"rule": "kohya", "bucket_no_upscale": True, "no_upscale_fit": "largest"},
    "novelai": {},
    "exact": {"switching": None},  # it compares no aspects
    "auto": {},
    "auto-optimal": {"rule": "auto"},
}
COMPARABLE = (*_OWN, "preset:NAME", "file:PATH", *TRAINERS)
# Names that stand for several.
GROUPS = {"trainers": tuple(TRAINERS), "all": (*_OWN, *TRAINERS)}


def names_of(text: str) -> list[str]:
    """The names in `kohya,trainers`, each once, groups taken apart. `ConfigError` where there is none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"--rules is {text!r}, but must be names separated by commas: {', '.join(COMPARABLE)}")
    return list(dict.fromkeys(name for part in parts for name in GROUPS.get(part, (part,))))


def compared_rule(name: str, options: RuleOptions, sizes: IntArray) -> BucketRule:
    """A rule by one of the names in `COMPARABLE`; other trainers' at the side of the resolution's area.

    Args:
        options: those that all rules share.
        sizes: [N, 2] sizes of the images, for rules that are made from them.

    Raises:
        KohyaBucketError: there is no such rule, or the options cannot work.
    """
    if name in TRAINERS:
        width, height = options.size
        return trainer_rule(name, round((width * height) ** 0.5))
    if name not in _OWN and not name.startswith(("preset:", "file:")):
        groups = ", ".join(GROUPS)
        raise ConfigError(f"there is no rule {name!r} to compare; there are {', '.join(COMPARABLE)}, and {groups}")
    own = replace(options, **{"rule": name, **_OWN.get(name, {})})
    return own.make(sizes, auto_method="optimal" if name == "auto-optimal" else "kmeans")
