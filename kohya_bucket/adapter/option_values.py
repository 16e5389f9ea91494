"""What the options of the `[kohya_bucket]` table may be, each by itself and together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kohya_bucket.buckets.choices import AUTO_METHODS, NO_UPSCALE_FITS, SWITCHING_METHODS, listed
from kohya_bucket.buckets.rules.registry import is_rule, named_rule, rule_choices
from kohya_bucket.errors import ConfigError, PlanError
from kohya_bucket.latents.architectures import TOKEN_GRIDS
from kohya_bucket.planning import ORDERS, REMAINDERS, RESOLUTION_MODES
from kohya_bucket.planning.options import COST
from kohya_bucket.planning.resolutions import weighted_cycle
from kohya_bucket.texts import counted

__all__ = ["CHOICES", "TABLE", "check_together", "expected_value", "parsed"]

TABLE = "kohya_bucket"

CHOICES: dict[str, Callable[[], Iterable[str]]] = {
    "remainder": lambda: REMAINDERS,
    "small_buckets": lambda: REMAINDERS,
    "order": lambda: [name for name, order in ORDERS.items() if order.shuffles],  # training wants no other
    "switching": lambda: SWITCHING_METHODS,
    "no_upscale_fit": lambda: NO_UPSCALE_FITS,
    "auto_method": lambda: AUTO_METHODS,
    "latent_cache": lambda: ("npz", "shards"),
    "text_cache": lambda: ("npz", "shards"),
    "on_bad_image": lambda: ("leave_out", "stop"),
    "resolution_mode": lambda: RESOLUTION_MODES,
    "model": lambda: TOKEN_GRIDS,
}
"""Options that are one of some names; those that are not registered when this is read are found too."""


def expected_value(key: str, value: Any) -> str:
    """What the value of `key` must be, or an empty string where it is that."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key == "rule":
        return "" if is_rule(value) else f"one of {', '.join(rule_choices())}"
    if key == "resolutions":
        good = isinstance(value, (list, tuple)) and len(value) > 0 and all(_as_resolution(v) is not None for v in value)
        if not good:
            return "a list of sides or of [width, height] pairs, e.g. [512, 768]"
        return "" if len({_as_resolution(v) for v in value}) == len(value) else "a list without repeats"
    if key == "resolution_weights":
        good = isinstance(value, (list, tuple)) and len(value) > 0 and all(_is_weight(v) for v in value)
        return "" if good and sum(value) > 0 else "a list of numbers, 0 or more and not all 0, e.g. [3, 1]"
    if key in ("max_crop", "merge_max_crop"):
        return "" if number and 0 <= value < 1 else "a share from 0 to less than 1, e.g. 0.05"
    if key == "cost":
        good = isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_weight(v) for v in value)
        return "" if good and sum(value) > 0 else "two numbers a, b of a * L + b * L * L, 0 or more and not both 0"
    if key == "max_cost":
        return "" if _is_weight(value) and value > 0 else "a number above 0"
    if key == "latent_cache_dir":
        return "" if isinstance(value, str) and value else "the path of a folder"
    if key == "metadata_cache":
        return "" if isinstance(value, str) and value else "auto, off or the path of a Parquet file"
    if key == "same_shape":
        return "" if isinstance(value, bool) or value == COST else f"true, false or {COST!r}"
    least = 2 if key == "open_shards" else 1
    return "" if isinstance(value, int) and number and value >= least else f"a whole number above {least - 1}"


def _as_resolution(value: Any) -> tuple[int, int] | None:
    pair = value if isinstance(value, (list, tuple)) else [value, value]
    good = len(pair) == 2 and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in pair)
    return (pair[0], pair[1]) if good else None


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def parsed(key: str, value: Any) -> Any:
    if key == "resolutions":
        return tuple(_as_resolution(v) for v in value)
    return tuple(value) if key in ("resolution_weights", "cost") else value


def _check_resolutions(merged: Mapping[str, Any]) -> None:
    resolutions, mode = merged.get("resolutions"), merged.get("resolution_mode", "all")
    weights, rule = merged.get("resolution_weights"), merged.get("rule", "kohya")
    if resolutions is None:
        alone = [key for key in ("resolution_mode", "resolution_weights") if key in merged]
        if alone:
            raise ConfigError(f"[{TABLE}] {alone[0]} is set without resolutions: say which, e.g. [512, 768]")
        return
    if RESOLUTION_MODES[mode].by_weight != (weights is not None):
        raise ConfigError(
            f"[{TABLE}] resolution_mode is {mode!r} and resolution_weights is {weights}: "
            "weights belong to 'weighted', and it needs them"
        )
    if weights is not None:
        if len(weights) != len(resolutions):
            raise ConfigError(
                f"[{TABLE}] resolution_weights has {counted(len(weights), 'number')} for "
                f"{counted(len(resolutions), 'resolution')}"
            )
        try:
            weighted_cycle(weights, len(weights))
        except PlanError as error:
            raise ConfigError(f"[{TABLE}] {error}") from error
    if named_rule(rule).own_sizes:
        others = listed((name for name, other in rule_choices().items() if not other.own_sizes), "or")
        raise ConfigError(
            f"[{TABLE}] resolutions is set with rule {rule!r}, whose buckets do not follow from a resolution: "
            f"use rule {others}, or leave resolutions out"
        )


def _check_small_buckets(merged: Mapping[str, Any]) -> None:
    remainder = merged.get("remainder", "keep")
    if "small_buckets" in merged and not REMAINDERS[remainder].leaves_out:
        raise ConfigError(
            f"[{TABLE}] small_buckets is set, but remainder is {remainder!r}, which trains the images of all buckets: "
            "leave small_buckets out, or set remainder = 'drop'"
        )


def _check_tokens(merged: Mapping[str, Any]) -> None:
    alone = [key for key in ("max_tokens", "max_cost", "cost") if merged.get(key) is not None]
    if alone and merged.get("model") is None:
        raise ConfigError(
            f"[{TABLE}] {alone[0]} is set without model, which says how many tokens an image has: "
            f"one of {', '.join(TOKEN_GRIDS)}"
        )


def _check_order(merged: Mapping[str, Any]) -> None:
    name = merged.get("order", "shuffled")
    if not ORDERS[name].uses_shards:
        return
    why = ""
    if merged.get("latent_cache", "npz") != "shards":
        why = "latents lie in files of their own: for sd-scripts set latent_cache = 'shards', or leave order out"
    elif merged.get("resolutions") is not None:
        why = "with resolutions the latents of an image lie in several shards: leave out one of them"
    elif merged.get("same_shape") == COST:
        why = f"same_shape = {COST!r} joins batches of several buckets in a step: leave out one of them"
    if why:
        raise ConfigError(f"[{TABLE}] order is {name!r}, but {why}")


def check_together(merged: Mapping[str, Any]) -> None:
    """Refuse options that need or exclude each other.

    Raises:
        ConfigError: with what to change.
    """
    _check_resolutions(merged)
    _check_small_buckets(merged)
    _check_tokens(merged)
    _check_order(merged)
