"""The rules that `compare` knows by name: the package's own, variants of them, and those of other trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kohya_bucket.buckets.choices import TRAINERS
from kohya_bucket.buckets.rules.registry import RULES, is_rule, rule_choices
from kohya_bucket.checks import one_of
from kohya_bucket.cli.rule_options import RuleOptions
from kohya_bucket.errors import ConfigError

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.buckets.sizes import IntArray

__all__ = ["comparable", "compared_rule", "groups", "names_of"]


def _own() -> dict[str, Mapping[str, Any]]:
    """The package's own rules and their variants, each with what it changes of the options."""
    out: dict[str, Mapping[str, Any]] = {}
    for name, rule in RULES.items():
        if not rule.argument:
            base = {"rule": name} if "switching" in rule.accepted_options else {"rule": name, "switching": None}
            out |= {name: base, **{variant: {**base, **changes} for variant, changes in rule.variants.items()}}
    return out


def comparable() -> list[str]:
    """All names."""
    return [*_own(), *(name for name, rule in rule_choices().items() if rule.argument), *TRAINERS]


def groups() -> dict[str, list[str]]:
    """Names that stand for several."""
    return {"trainers": [*TRAINERS], "all": [*_own(), *TRAINERS]}


def names_of(text: str) -> list[str]:
    """The names in `kohya,trainers`, each once, groups taken apart. `ConfigError` where there is none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"--rules is {text!r}, but must be names separated by commas: {', '.join(comparable())}")
    return list(dict.fromkeys(name for part in parts for name in groups().get(part, (part,))))


def compared_rule(name: str, options: RuleOptions, sizes: IntArray) -> BucketRule:
    """A rule by one of the names in `comparable()`; other trainers' at the side of the resolution's area.

    Args:
        options: those that all rules share.
        sizes: [N, 2] sizes of the images, for rules that are made from them.

    Raises:
        KohyaBucketError: there is no such rule, or the options cannot work.
    """
    if name in TRAINERS:
        width, height = options.size
        rule: BucketRule = TRAINERS[name].load()(round((width * height) ** 0.5))
        return rule
    own = _own()
    if name not in own and not is_rule(name):
        one_of("rule", name, [*comparable(), *groups()], ConfigError)
    changes = dict(own.get(name, {"rule": name}))
    auto_method = changes.pop("auto_method", "kmeans")
    return replace(options, **changes).make(sizes, auto_method=auto_method)
