"""The `[kohya_bucket]` table: which options there are, where they come from, and what is refused.

Options stand in a `[kohya_bucket]` table of the dataset config, or in the file that the environment
variable `KOHYA_BUCKET_CONFIG` names (for runs without a dataset config). A key in the dataset config wins.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kohya_bucket.buckets.choices import AUTO_METHODS, NO_UPSCALE_FITS, SWITCHING_METHODS, listed
from kohya_bucket.buckets.rules.registry import is_rule, named_rule, rule_choices
from kohya_bucket.checks import nearest, one_of
from kohya_bucket.errors import ConfigError, PlanError
from kohya_bucket.planning import ORDERS, REMAINDERS, RESOLUTION_MODES
from kohya_bucket.planning.resolutions import weighted_cycle

__all__ = ["DEFAULT_STORE", "ENVIRONMENT_VARIABLE", "TABLE", "AdapterOptions", "environment_table"]

TABLE = "kohya_bucket"
ENVIRONMENT_VARIABLE = "KOHYA_BUCKET_CONFIG"
DEFAULT_STORE = "kohya_bucket_latents"  # folder of the store, where training is started

_CHOICES: dict[str, Callable[[], Iterable[str]]] = {
    "remainder": lambda: REMAINDERS,
    "order": lambda: [name for name, order in ORDERS.items() if order.shuffles],  # training wants no other
    "switching": lambda: SWITCHING_METHODS,
    "no_upscale_fit": lambda: NO_UPSCALE_FITS,
    "auto_method": lambda: AUTO_METHODS,
    "latent_cache": lambda: ("npz", "shards"),
    "text_cache": lambda: ("npz", "shards"),
    "resolution_mode": lambda: RESOLUTION_MODES,
}


@dataclass(frozen=True)
class AdapterOptions:
    """Options of the adapter. The defaults train what sd-scripts says it trains.

    Attributes:
        rule: what decides buckets: `kohya`, `novelai`, `exact`, `auto`, `preset:NAME` or `file:PATH`.
        switching: where one bucket hands over to the next: `midpoint`, `geometric` or `area`; by default the
            rule's own.
        no_upscale_fit: with `bucket_no_upscale`, `largest` keeps the most of each image's pixels where sd-scripts
            (`kohya`) sometimes takes a smaller bucket than would fit.
        max_crop: largest share of an image that may be cropped off, e.g. 0.05; images beyond it are moved to a
            better bucket or left out by name.
        num_buckets: how many buckets rule `auto` makes.
        auto_method: how rule `auto` finds them: `kmeans` or `optimal`.
        remainder: what happens to the images of a bucket that fill no batch: `keep` trains them as a short batch;
            `REMAINDERS` has the others, each with a text.
        merge_max_crop: with `merge`, the largest share of an image that the move may crop off; where images must not
            be enlarged, pixels lost by scaling down count too.
        resolutions: train each image at several resolutions, e.g. [512, 768, [1024, 768]], in place of the
            datasets' own.
        resolution_mode: `all` trains each image at each resolution in each epoch, `rotate` at one per epoch in turn,
            `weighted` at one, in the shares of `resolution_weights`.
        resolution_weights: one number per resolution, for `weighted`: [3, 1] is three epochs out of four.
        order: `shuffled`, `runs` (several steps of one shape after another) or `sorted`.
        run_length: steps of one shape in a row, with order `runs`.
        max_pixels: bound of images x width x height for one process and step; small buckets then train larger
            batches, and `batch_size` is not used.
        same_shape: every process trains the same shape in a step. Switched off, each process has batches of its
            own, as in sd-scripts, at the price of waiting for the largest.
        metadata_cache: where image sizes are kept between runs: `auto` (large data sets, in the user's cache
            folder), `off`, or a Parquet file.
        latent_cache: what --cache_latents_to_disk writes: `npz`, sd-scripts' own files and names, checked and
            written whole, or `shards`, a store of few files.
        text_cache: what --cache_text_encoder_outputs_to_disk writes: `npz`, or `shards`, in the folder `text` of the
            same store: each caption once, in the type that its encoder gave.
        latent_cache_dir: folder of the store; by default `kohya_bucket_latents` where training is started.
    """

    rule: str = "kohya"
    switching: str | None = None
    no_upscale_fit: str = "kohya"
    max_crop: float | None = None
    num_buckets: int = 8
    auto_method: str = "kmeans"
    remainder: str = "keep"
    merge_max_crop: float = 0.25
    resolutions: tuple[tuple[int, int], ...] | None = None
    resolution_mode: str = "all"
    resolution_weights: tuple[float, ...] | None = None
    order: str = "shuffled"
    run_length: int = 8
    max_pixels: int | None = None
    same_shape: bool = True
    metadata_cache: str = "auto"
    latent_cache: str = "npz"
    text_cache: str = "npz"
    latent_cache_dir: str | None = None

    @property
    def several_sizes(self) -> bool:
        """Whether an image may be trained at another size than its own bucket's."""
        return self.resolutions is not None or self.moves_images

    @property
    def moves_images(self) -> bool:
        """Whether `remainder` trains images in other buckets than their own."""
        return REMAINDERS[self.remainder].moves_images

    @classmethod
    def from_tables(cls, *tables: tuple[str, Mapping[str, Any]]) -> AdapterOptions:
        """Merge tables, later ones winning. Each comes with the place it was read from, for messages.

        Raises:
            ConfigError: an unknown key (with the nearest known one) or a value that is not allowed.
        """
        known = {f.name: f for f in fields(cls)}
        merged: dict[str, Any] = {}
        for place, table in tables:
            if not isinstance(table, Mapping):
                raise ConfigError(f"{place}: [{TABLE}] must be a table of options, got {table!r}")
            for key, value in table.items():
                if key not in known:
                    raise ConfigError(
                        f"{place}: [{TABLE}] has no option {key!r}; the nearest is {nearest(key, known)!r}. "
                        f"Known: {', '.join(sorted(known))}"
                    )
                where = f"{place}: [{TABLE}] {key}"
                if key in _CHOICES:
                    one_of(where, value, _CHOICES[key](), ConfigError)
                elif expected := _expected(key, value):
                    raise ConfigError(f"{where} is {value!r}, but must be {expected}")
                merged[key] = _parsed(key, value)
        _check_resolutions(merged)
        return cls(**merged)


def _expected(key: str, value: Any) -> str:
    """What the value of `key` must be, or an empty string where it is that."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key == "rule":
        return "" if is_rule(value) else f"one of {', '.join(rule_choices())}"
    if key == "resolutions":
        good = isinstance(value, (list, tuple)) and len(value) > 0 and all(_as_resolution(v) is not None for v in value)
        if not good:
            return "a list of sides or [width, height] pairs, e.g. [512, 768]"
        return "" if len({_as_resolution(v) for v in value}) == len(value) else "a list without repeats"
    if key == "resolution_weights":
        good = isinstance(value, (list, tuple)) and len(value) > 0 and all(_is_weight(v) for v in value)
        return "" if good and sum(value) > 0 else "a list of numbers, 0 or more and not all 0, e.g. [3, 1]"
    if key in ("max_crop", "merge_max_crop"):
        return "" if number and 0 <= value < 1 else "a share from 0 to less than 1, e.g. 0.05"
    if key == "latent_cache_dir":
        return "" if isinstance(value, str) and value else "the path of a folder"
    if key == "metadata_cache":
        return "" if isinstance(value, str) and value else "auto, off or the path of a Parquet file"
    if key == "same_shape":
        return "" if isinstance(value, bool) else "true or false"
    return "" if isinstance(value, int) and number and value > 0 else "a whole number above 0"


def _as_resolution(value: Any) -> tuple[int, int] | None:
    pair = value if isinstance(value, (list, tuple)) else [value, value]
    good = len(pair) == 2 and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in pair)
    return (pair[0], pair[1]) if good else None


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _parsed(key: str, value: Any) -> Any:
    if key == "resolutions":
        return tuple(_as_resolution(v) for v in value)
    return tuple(value) if key == "resolution_weights" else value


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
                f"[{TABLE}] resolution_weights has {len(weights)} numbers for {len(resolutions)} resolutions"
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


def environment_table() -> list[tuple[str, Mapping[str, Any]]]:
    """The options of the file named by `KOHYA_BUCKET_CONFIG`: none, or one (place, table) pair.

    The file is TOML or JSON; options stand in a `[kohya_bucket]` table or at the top level.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    if not name:
        return []
    path = Path(name)
    place = f"{ENVIRONMENT_VARIABLE}={name}"
    if not path.is_file():
        raise ConfigError(f"{place}: there is no such file; correct the variable or unset it")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".json":
            import json

            table = json.loads(text)
        else:
            import toml

            table = toml.loads(text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 ({error}): save it as UTF-8") from error
    # Errors of both parsers are ValueErrors; toml lets others through for some slips.
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{place}: cannot be parsed: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: must hold a table of options, not {type(table).__name__}")
    return [(place, table.get(TABLE, table))]
