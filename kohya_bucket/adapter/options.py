"""The `[kohya_bucket]` table: which options there are, what they may be, and where they come from.

Options stand in a `[kohya_bucket]` table of the dataset config, or in the file that the environment
variable `KOHYA_BUCKET_CONFIG` names (for runs without a dataset config). A key in the dataset config wins.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.config_source import Source
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.buckets import list_presets
from kohya_bucket.buckets.choices import Check, RuleOptions, choice, is_number, listed, option, share, whole_number
from kohya_bucket.buckets.rules.registry import is_rule, named_rule, rule_choices
from kohya_bucket.checks import nearest, one_of
from kohya_bucket.datasets.planned_index import ON_BAD_IMAGE
from kohya_bucket.errors import ConfigError, KohyaBucketError, PlanError
from kohya_bucket.images.remote import is_url
from kohya_bucket.latents.architectures import TOKEN_GRIDS
from kohya_bucket.latents.store.storage import StorePath, as_given
from kohya_bucket.planning.options import COST
from kohya_bucket.planning.orders import ORDERS
from kohya_bucket.planning.remainders import REMAINDERS, RemainderPolicy, policies_of
from kohya_bucket.planning.resolutions import RESOLUTION_MODES, weighted_cycle
from kohya_bucket.texts import counted, parse_json, parse_toml, read_text

TABLE = "kohya_bucket"
_CODE = "settings"  # of findings
ENVIRONMENT_VARIABLE = "KOHYA_BUCKET_CONFIG"


def _text(what: str) -> Check:
    return lambda value: "" if isinstance(value, str) and value else what


def _rule(value: Any) -> str:
    if value in list_presets():
        return f"written 'preset:{value}'"
    return "" if is_rule(value) else f"one of {', '.join(rule_choices())}"


def _local_file(value: Any) -> str:
    good = isinstance(value, str) and value and not is_url(value)
    return "" if good else "auto, off or the path of a Parquet file on this machine"


def _is_weight(value: Any) -> bool:
    return is_number(value) and 0 <= value < math.inf


def _weights(value: Any) -> str:
    good = isinstance(value, (list, tuple)) and len(value) > 0 and all(map(_is_weight, value))
    return "" if good and sum(value) > 0 else "a list of numbers, 0 or more and not all 0, e.g. [3, 1]"


def _cost(value: Any) -> str:
    good = not _weights(value) and len(value) == 2
    return "" if good else "two numbers a, b of a * L + b * L * L, 0 or more and not both 0"


def _same_shape(value: Any) -> str:
    return "" if isinstance(value, bool) or value == COST else f"true, false or {COST!r}"


def _resolutions(value: Any) -> str:
    if not (isinstance(value, (list, tuple)) and len(value) > 0 and all(_as_resolution(v) is not None for v in value)):
        return "a list of sides or of [width, height] pairs, e.g. [512, 768]"
    return "" if len({_as_resolution(v) for v in value}) == len(value) else "a list without repeats"


def _as_resolution(value: Any) -> tuple[int, int] | None:
    pair = value if isinstance(value, (list, tuple)) else [value, value]
    good = len(pair) == 2 and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in pair)
    return (pair[0], pair[1]) if good else None


@dataclass(frozen=True)
class AdapterOptions(RuleOptions):
    """Options of the adapter: those of rules, and these. The defaults train what sd-scripts says it trains.

    Attributes:
        rule: what decides buckets: `kohya`, `novelai`, `exact`, `auto`, `preset:NAME` or `file:PATH`.
        remainder: what happens to the images of a bucket that fill no batch: `keep` trains them as a short batch;
            `REMAINDERS` has the others, each with a text.
        small_buckets: with `drop`, what happens to buckets that never fill a batch: `keep` (the default) trains
            them in short batches; or any other remainder; `drop` never trains them.
        merge_max_crop: with `merge`, the largest share of an image that the move may crop off; where images must not
            be enlarged, pixels lost by scaling down count too.
        focus: what crops must keep: a JSON Lines or Parquet file with a rectangle for each image, or `beside` for a
            file beside each image; see `images/focus_files.py`.
        focus_weight: share of an image that may be cropped off to keep its rectangle whole: where no crop of its bucket
            does, or `max_crop` leaves it out, it trains in the bucket that crops off least of those that do.
        resolutions: train each image at several resolutions, e.g. [512, 768, [1024, 768]], in place of the
            datasets' own.
        resolution_mode: `all` trains each image at each resolution in each epoch, `rotate` at one per epoch in turn,
            `weighted` at one, in the shares of `resolution_weights`.
        resolution_weights: one number per resolution, for `weighted`: [3, 1] is three epochs out of four.
        order: `shuffled`, `runs` (several steps of one shape after another), or `local` (few shards of the latent
            cache at a time, for a store in object storage).
        run_length: steps of one shape in a row, with order `runs`.
        open_shards: shards that are being read at a time, with order `local`.
        max_pixels: bound of images x width x height for one process and step; small buckets then train larger
            batches, and `batch_size` is not used.
        max_tokens: the same in tokens that `model` makes of an image or a clip.
        max_cost: the same in cost: `cost` says of what.
        model: the transformer whose tokens and cost count, e.g. `flux` or `wan-1.3b`; `TOKEN_GRIDS` has them all.
        cost: [a, b], so that an image of L tokens costs a * L + b * L * L, as `kohya-bucket measure-cost` prints it;
            by default in tokens, with what the model's attention adds.
        same_shape: `cost`: where a bucket has too few batches for all processes, batches of nearly equal cost meet in
            a step: of `model`, else of pixels. `true`: all processes train one bucket in every step, and repeat
            images where it has too few; order `local` needs it. `false`: each process has batches of its own, as in
            sd-scripts, and waits for the largest.
        on_bad_image: what happens to an image that turns out unreadable in training: `leave_out` names it and trains
            another of its bucket in its place; `stop` ends the run with one line.
        metadata_cache: where image sizes are kept between runs: `auto` (large data sets, in the user's cache
            folder), `off`, or a Parquet file.
        latent_cache: what --cache_latents_to_disk writes: `npz`, sd-scripts' own files and names, checked and
            written whole, or `shards`, a store of few files.
        text_cache: what --cache_text_encoder_outputs_to_disk writes: `npz`, or `shards`, in the folder `text` of the
            same store: each caption once, in the type that its encoder gave.
        latent_cache_dir: folder of the store; by default `kohya_bucket_latents` beside the first image of
            each data set.
    """

    rule: str = option("kohya", _rule)
    remainder: str = choice("keep", lambda: REMAINDERS)
    small_buckets: str | None = choice(None, lambda: REMAINDERS)
    merge_max_crop: float = option(0.25, share)
    focus: str | None = option(None, _text("the path of a .jsonl or .parquet file, or beside"))
    focus_weight: float = option(0.0, share)
    resolutions: tuple[tuple[int, int], ...] | None = option(
        None, _resolutions, lambda value: tuple(map(_as_resolution, value))
    )
    resolution_mode: str = choice("all", lambda: RESOLUTION_MODES)
    resolution_weights: tuple[float, ...] | None = option(None, _weights, tuple)
    # training wants no order without shuffling
    order: str = choice("shuffled", lambda: [name for name, order in ORDERS.items() if order.shuffles])
    run_length: int = option(8, whole_number(1))
    open_shards: int = option(64, whole_number(2))
    max_pixels: int | None = option(None, whole_number(1))
    max_tokens: int | None = option(None, whole_number(1))
    max_cost: float | None = option(None, lambda one: "" if _is_weight(one) and one > 0 else "a number above 0")
    model: str | None = choice(None, lambda: TOKEN_GRIDS)
    cost: tuple[float, float] | None = option(None, _cost, tuple)
    same_shape: bool | str = option(COST, _same_shape)
    on_bad_image: str = choice("leave_out", lambda: ON_BAD_IMAGE)
    metadata_cache: str = option("auto", _local_file)
    latent_cache: str = choice("npz", lambda: ("npz", "shards"))
    text_cache: str = choice("npz", lambda: ("npz", "shards"))
    latent_cache_dir: str | None = option(None, _text("the path of a folder"))

    @property
    def has_budget(self) -> bool:
        """Whether batch sizes follow from a budget, and not from the trainer's own number."""
        return any(budget is not None for budget in (self.max_pixels, self.max_tokens, self.max_cost))

    @property
    def token_cost(self) -> tuple[float, float]:
        """(a, b) of the cost of an image."""
        if self.cost is not None or self.model is None:
            return self.cost or (1.0, 0.0)
        return TOKEN_GRIDS[self.model].token_cost

    @property
    def several_sizes(self) -> bool:
        """Whether an image may be trained at another size than its own bucket's."""
        return self.resolutions is not None or bool(self.moving)

    @property
    def moving(self) -> dict[str, RemainderPolicy]:
        """What trains images in other buckets than their own: `remainder`, or `small_buckets`."""
        policies = zip(("remainder", "small_buckets"), policies_of(self.remainder, self.small_buckets), strict=False)
        return {name: policy for name, policy in policies if policy.moves_images}

    def over(self, **given: Any) -> AdapterOptions:
        """These options under those that are given. Raises `ConfigError` where these exclude others."""
        options = replace(self, **given)
        for conflict in _conflicts(options, given):
            raise ConfigError(f"[{TABLE}] {conflict}")
        return options

    @classmethod
    def from_tables(cls, *tables: tuple[str, Mapping[str, Any]]) -> AdapterOptions:
        """Merge tables, later ones winning. Each comes with the place it was read from, for messages.

        Raises:
            ConfigError: unknown keys (each with the nearest known one) or values that are not allowed.
        """
        findings = Findings()
        return required(cls._merged(tables, findings), findings)

    @classmethod
    def of_config(cls, source: Source, findings: Findings) -> AdapterOptions | None:
        """The table of a config over that of the environment; None where there are mistakes, all of which are added."""
        own = [(source, source.data[TABLE])] if TABLE in source.data else []
        try:
            return cls._merged([*environment_table(), *own], findings)
        except ConfigError as error:
            findings.error(_CODE, "", str(error))
            return None

    @classmethod
    def _merged(cls, tables: Iterable[tuple[str | Source, Any]], findings: Findings) -> AdapterOptions | None:
        merged: dict[str, Any] = {}
        places: dict[str, str] = {}
        mistakes = Findings()
        for place, table in tables:
            at = place.line_of if isinstance(place, Source) else lambda *_, place=place: place
            for key, value in table.items() if isinstance(table, Mapping) else ():
                places[key] = at(TABLE, key).rstrip(", ")
                try:
                    merged[key] = _read_option(key, value)
                except ConfigError as error:
                    mistakes.error(_CODE, places[key], str(error), names=(key,))
            if not isinstance(table, Mapping):
                message = f"[{TABLE}] must be a table of options, got {table!r}"
                mistakes.error(_CODE, at(TABLE).rstrip(", "), message)
        if not len(mistakes):
            if ORDERS[merged.get("order", cls.order)].uses_shards:
                merged.setdefault("same_shape", True)
            options = cls(**merged)
            for conflict in _conflicts(options, places):
                mistakes.error(_CODE, places.get(conflict.split()[0], ""), f"[{TABLE}] {conflict}")
        findings.add(mistakes)
        return None if len(mistakes) else options


def _read_option(key: str, value: Any) -> Any:
    """An option's value as it is used. Raises `ConfigError` for an unknown key, or a value that is not allowed."""
    known = {one.name: one.metadata for one in fields(AdapterOptions)}
    if key not in known:
        raise ConfigError(f"[{TABLE}] has no option {key!r}; the nearest is {nearest(key, known)!r}")
    option, name = known[key], f"[{TABLE}] {key}"
    if "known" in option:
        one_of(name, value, option["known"](), ConfigError)
    elif expected := option["check"](value):
        raise ConfigError(f"{name} is {value!r}, but must be {expected}")
    return option["read"](value)


def required(options: AdapterOptions | None, findings: Findings) -> AdapterOptions:
    """The options; `ConfigError` with all mistakes in them where there are none."""
    if options is None:
        raise ConfigError("; ".join(finding.text for finding in findings if finding.code == _CODE))
    return options


def _conflicts(options: AdapterOptions, given: Collection[str]) -> Iterator[str]:
    """Which options exclude each other, and what to do: each text begins with the option at fault."""
    if options.resolutions is not None:
        yield from _conflicts_with_resolutions(options, options.resolutions)
    elif alone := [key for key in ("resolution_mode", "resolution_weights") if key in given]:
        yield f"{alone[0]} is set without resolutions: say which, e.g. [512, 768]"
    if options.focus_weight and options.focus is None:
        yield "focus_weight is set without focus, which says what crops must keep: set focus, or leave it out"
    for name, policy in options.moving.items() if options.focus_weight else ():
        yield (
            f"{name} is {policy.name!r}, which moves images away again from the bucket that holds their focus: use "
            "'keep', 'pad' or 'drop', or leave focus_weight out"
        )
    if "small_buckets" in given and not REMAINDERS[options.remainder].leaves_out:
        yield (
            f"small_buckets is set, but remainder is {options.remainder!r}, which trains the images of all buckets: "
            "leave small_buckets out, or set remainder = 'drop'"
        )
    alone = [key for key in ("max_tokens", "max_cost", "cost") if getattr(options, key) is not None]
    if alone and options.model is None:
        models = ", ".join(TOKEN_GRIDS)
        yield f"{alone[0]} is set without model, which says how many tokens an image has: one of {models}"
    if ORDERS[options.order].uses_shards:
        but = f"order is {options.order!r}, but"
        if options.latent_cache != "shards":
            remedy = "for sd-scripts set latent_cache = 'shards', or leave order out"
            yield f"{but} latents lie in files of their own: {remedy}"
        if options.resolutions is not None:
            yield f"{but} with resolutions the latents of an image lie in several shards: leave out one of them"
        if options.same_shape == COST:
            yield f"{but} same_shape = {COST!r} joins batches of several buckets in a step: leave out one of them"


def _conflicts_with_resolutions(options: AdapterOptions, resolutions: Sequence[Any]) -> Iterator[str]:
    mode, weights = options.resolution_mode, options.resolution_weights
    if RESOLUTION_MODES[mode].by_weight != (weights is not None):
        yield (
            f"resolution_mode is {mode!r} and resolution_weights is {weights}: weights belong to 'weighted', and it "
            "needs them"
        )
    if weights is not None and len(weights) != len(resolutions):
        numbers = counted(len(weights), "number")
        yield f"resolution_weights has {numbers} for {counted(len(resolutions), 'resolution')}"
    elif weights is not None:
        try:
            weighted_cycle(weights, len(weights))
        except PlanError as error:
            yield str(error)
    if named_rule(options.rule).own_sizes:
        others = listed((name for name, other in rule_choices().items() if not other.own_sizes), "or")
        yield (
            f"resolutions is set with rule {options.rule!r}, whose buckets do not follow from a resolution: use rule "
            f"{others}, or leave resolutions out"
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
    if not path.exists():
        raise ConfigError(f"{place}: there is no such file; correct the variable or unset it")
    try:
        table = (parse_json if path.suffix.lower() == ".json" else parse_toml)(read_text(path))
    except KohyaBucketError as error:
        raise ConfigError(f"{place}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{place}: cannot be parsed: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: must hold a table of options, not {type(table).__name__}")
    return [(place, table.get(TABLE, table))]


def store_folder(options: AdapterOptions, first_image: str | os.PathLike[str]) -> StorePath:
    """`latent_cache_dir`, or the folder `kohya_bucket_latents` beside a data set's first image.

    Wherever training is started, it finds the same folder, and whoever moves the images takes it along.
    """
    if options.latent_cache_dir:
        return as_given(options.latent_cache_dir)
    return Path(first_image).absolute().parent / "kohya_bucket_latents"
