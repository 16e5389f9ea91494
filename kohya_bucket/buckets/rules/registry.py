"""A rule from its name, as config files and the command line give it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kohya_bucket.buckets.presets import load_preset
from kohya_bucket.buckets.rule import BucketRule
from kohya_bucket.buckets.rules.auto import AutoBuckets
from kohya_bucket.buckets.rules.exact import ExactBuckets
from kohya_bucket.buckets.rules.fixed import FixedBuckets
from kohya_bucket.buckets.rules.kohya import KohyaBuckets
from kohya_bucket.buckets.rules.novelai import NovelAIBuckets
from kohya_bucket.buckets.set_files import load_from_json, load_from_toml
from kohya_bucket.buckets.sizes import as_resolution, as_sizes
from kohya_bucket.errors import BucketSettingsError, ConfigError

__all__ = ["RULE_NAMES", "rule_from_name"]

RULE_NAMES = ("kohya", "novelai", "exact", "auto", "preset:NAME", "file:PATH")


def rule_from_name(
    name: str,
    *,
    max_reso: tuple[int, int] | int,
    min_size: int = 256,
    max_size: int = 1024,
    reso_steps: int = 64,
    no_upscale: bool = False,
    sizes: Any = None,
    switching: str | None = None,
    no_upscale_fit: str = "kohya",
    max_crop: float | None = None,
    num_buckets: int = 8,
    auto_method: str = "kmeans",
) -> BucketRule:
    """The rule that a name stands for, with sd-scripts' bucket settings.

    Args:
        name: `kohya`, `novelai`, `exact`, `auto`, `preset:NAME` or `file:PATH` (TOML, or JSON by its suffix).
        max_reso: (width, height) in pixels whose area no generated bucket exceeds; an int means a square.
        min_size, max_size, reso_steps, no_upscale: as sd-scripts names them. `kohya` and `exact` ignore the two
            limits with `no_upscale`, as sd-scripts does; presets and files ignore all but `no_upscale`.
        sizes: [N, 2] sizes of the data, needed by `auto`; rows with a side below 1 are left out.
        switching: `midpoint`, `geometric` or `area`; None is the rule's own (midpoint for `kohya` and `novelai`,
            geometric for the others). `exact` compares no aspects and refuses it.
        no_upscale_fit: `kohya` or `largest`; only `kohya` without upscaling knows the latter.
        max_crop: largest share of an image that may be cropped off.
        num_buckets, auto_method: for `auto`; see `generate_buckets`.

    Raises:
        ConfigError: there is no such rule, preset or key in the file.
        BucketSettingsError: settings that do not work, or do nothing for this rule.
        FileNotFoundError: no such file.
    """
    if reso_steps < 1:
        raise BucketSettingsError(f"bucket_reso_steps is {reso_steps}, but must be 1 or more; 64 is usual")
    kind, _, argument = name.partition(":")
    if name != "kohya" and no_upscale_fit != "kohya":
        raise BucketSettingsError(
            f"no_upscale_fit is {no_upscale_fit!r}, which only the rule kohya has: leave it out with rule {name!r}"
        )
    width, height = as_resolution("resolution", max_reso)
    given = {} if switching is None else {"switching": switching}
    limits: dict[str, Any] = {"no_upscale": no_upscale, "max_crop": max_crop, **given}
    if name == "kohya":
        return KohyaBuckets(
            (width, height), min_size, max_size, reso_steps, no_upscale_fit=no_upscale_fit, **limits
        )  # fmt: skip
    if name == "novelai":
        side = math.isqrt(width * height) // reso_steps * reso_steps
        return NovelAIBuckets((width, height), reso_steps, min_size, (side, side), max_size, **limits)
    if name == "exact":
        if switching not in (None, "midpoint"):
            raise BucketSettingsError(f"switching is {switching!r}, but rule 'exact' compares no aspects: leave it out")
        sides: dict[str, Any] = {} if no_upscale else {"min_side": min_size, "max_side": max_size}
        return ExactBuckets((width, height), reso_steps, no_upscale=no_upscale, max_crop=max_crop, **sides)
    if name == "auto":
        if sizes is None:
            raise BucketSettingsError("rule 'auto' makes its buckets from the images, but no sizes were given")
        data = as_sizes(sizes)
        return AutoBuckets.from_dims(
            data[data.min(axis=1, initial=1) > 0], num_buckets=num_buckets, target=(width, height),
            vae_factor=reso_steps, min_side=min_size, max_side=max_size, method=auto_method, **limits,
        )  # fmt: skip
    if kind == "preset" and argument:
        return FixedBuckets(load_preset(argument), **limits)
    if kind == "file" and argument:
        load = load_from_json if Path(argument).suffix.lower() == ".json" else load_from_toml
        return FixedBuckets(load(argument), **limits)
    raise ConfigError(f"there is no rule {name!r}; there are {', '.join(RULE_NAMES)}")
