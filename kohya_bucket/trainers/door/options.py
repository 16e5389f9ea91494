"""The `[kohya_bucket]` table: which options there are, what they may be, and where they come from.

Options stand in a `[kohya_bucket]` table of the dataset config, or in the file that the environment
variable `KOHYA_BUCKET_CONFIG` names (for runs without a dataset config). A key in the dataset config wins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.buckets import list_presets
from kohya_bucket.buckets.choices import RuleOptions, listed
from kohya_bucket.buckets.focus import BESIDE
from kohya_bucket.buckets.rules.registry import is_rule, named_rule, rule_choices
from kohya_bucket.checks import Check, nearest
from kohya_bucket.datasets.planned_index import ON_BAD_IMAGE
from kohya_bucket.errors import ConfigError, KohyaBucketError, PlanError
from kohya_bucket.images.remote import is_url
from kohya_bucket.latents.token_grids import TOKEN_GRIDS
from kohya_bucket.options import choice, option, read_value, without_effect
from kohya_bucket.planning.options import EpochOptions
from kohya_bucket.planning.orders import ORDERS
from kohya_bucket.planning.remainders import RemainderPolicy
from kohya_bucket.planning.resolutions import RESOLUTION_MODES, stage_starts, weighted_cycle
from kohya_bucket.texts import counted, parse_json, parse_toml, read_text
from kohya_bucket.trainers.door.findings import Findings

if TYPE_CHECKING:
    from kohya_bucket.latents.store.storage import StorePath
    from kohya_bucket.trainers.door.config_source import ConfigSource

TABLE = "kohya_bucket"
_CODE = "settings"  # of findings
LineOf = Callable[..., str]  # of the place of a key in a file
ENVIRONMENT_VARIABLE = "KOHYA_BUCKET_CONFIG"


def _text(what: str) -> Check:
    return lambda value: "" if isinstance(value, str) and value else what


def _rule(value: Any) -> str:
    if is_rule(value):
        return ""
    return f"written 'preset:{value}'" if value in list_presets() else f"one of {', '.join(rule_choices())}"


def _local_file(value: Any) -> str:
    good = isinstance(value, str) and value and not is_url(value)
    return "" if good else "auto, off or the path of a Parquet file on this machine"


def _resolutions(value: Any) -> str:
    if not (isinstance(value, (list, tuple)) and len(value) > 0 and all(_as_resolution(v) is not None for v in value)):
        return "a list of sides or of [width, height] pairs, e.g. [512, 768]"
    return "" if len({_as_resolution(v) for v in value}) == len(value) else "a list without repeats"


def _as_resolution(value: Any) -> tuple[int, int] | None:
    pair = value if isinstance(value, (list, tuple)) else [value, value]
    good = len(pair) == 2 and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in pair)
    return (pair[0], pair[1]) if good else None


_FOR_SHARDS = (lambda o: o.latent_cache == "shards", "latent_cache = 'shards'")


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(RuleOptions, EpochOptions):
    """Options of the adapter: those of rules, of epochs, and these. The defaults train what a trainer says it trains.

    Attributes:
        rule: what decides buckets: `kohya`, `novelai`, `exact`, `auto`, `preset:NAME` or `file:PATH`.
        focus: what crops must keep: a JSON Lines or Parquet file with a rectangle for each image, or `beside` for a
            file beside each image; see `images/focus_files.py`.
        resolutions: train each image at several resolutions, e.g. [512, 768, [1024, 768]], in place of the
            datasets' own; `resolution_mode` says at which of them an epoch trains an image. Without them `schedule` is
            of the datasets: those of the first resolution in the config are trained first, then those of the next.
        order: those of `ORDERS` that shuffle; `local` needs a store of latents.
        model: the transformer whose tokens and cost count, e.g. `flux` or `wan-1.3b`; `TOKEN_GRIDS` has them all.
        on_bad_image: what happens to an image that turns out unreadable in training: `leave_out` names it and trains
            another of its bucket in its place; `stop` ends the run with one line.
        metadata_cache: where image sizes are kept between runs: `auto` (large datasets, in the user's cache
            folder), `off`, or a Parquet file.
        latent_cache: what --cache_latents_to_disk writes: `npz`, the trainer's own files and names, checked and
            written whole, or `shards`, a store of few files.
        latent_cache_dir: folder of the store; by default `kohya_bucket_latents` beside the first image of
            each dataset.
    """

    rule: str = option("kohya", _rule)
    focus: str | None = option(None, _text("the path of a .jsonl or .parquet file, or beside"))
    resolutions: tuple[tuple[int, int], ...] | None = option(
        None, _resolutions, lambda value: tuple(map(_as_resolution, value))
    )
    resolution_mode: str = choice(
        "all", lambda: RESOLUTION_MODES, needs=(lambda o: o.resolutions is not None or o.by_datasets, "resolutions")
    )
    # training wants no order without shuffling
    order: str = choice("shuffled", lambda: [name for name, order in ORDERS.items() if order.shuffles])
    model: str | None = choice(None, lambda: TOKEN_GRIDS)
    on_bad_image: str = choice("leave_out", lambda: ON_BAD_IMAGE)
    metadata_cache: str = option("auto", _local_file)
    latent_cache: str = choice("npz", lambda: ("npz", "shards"))
    latent_cache_dir: str | None = option(None, _text("the path of a folder"), needs=_FOR_SHARDS)

    def of_epochs(self) -> dict[str, Any]:
        """The options of epochs by name, as keyword arguments of `PlanOptions`."""
        options = {one.name: getattr(self, one.name) for one in fields(EpochOptions)}
        return options | {
            "resolution_mode": self.resolution_mode if self.resolutions or self.by_datasets else None,
            # trainers count epochs from 1
            "resolution_epochs": (one := self.resolution_epochs) and (one[0] + 1, *one[1:]),
        }

    @property
    def has_budget(self) -> bool:
        """Whether batch sizes follow from a budget, and not from the trainer's own number."""
        return any(budget is not None for budget in (self.max_pixels, self.max_tokens))

    @property
    def token_cost(self) -> tuple[float, float]:
        """(a, b) of the cost of an image."""
        return (1.0, 0.0) if self.model is None else TOKEN_GRIDS[self.model].token_cost

    @property
    def several_sizes(self) -> bool:
        """Whether an image may be trained at another size than its own bucket's."""
        return self.resolutions is not None or bool(self.moving)

    @property
    def by_datasets(self) -> bool:
        """Datasets are trained one after another, by their own resolutions."""
        return self.resolutions is None and RESOLUTION_MODES[self.resolution_mode].by_schedule

    def unscheduled(self) -> AdapterOptions:
        """The same for a part of the datasets, all of which every epoch trains."""
        return replace(self, resolution_mode="all", resolution_epochs=None) if self.by_datasets else self

    def for_validation(self) -> AdapterOptions:
        """The same for validation, whose order is always the same: what it leaves out would never be validated."""
        return replace(self.unscheduled(), remainder="keep") if self.policies[0].leaves_out else self.unscheduled()

    @property
    def moving(self) -> dict[str, RemainderPolicy]:
        """What trains images in other buckets than their own: `remainder`, or `small_buckets`."""
        policies = zip(("remainder", "small_buckets"), self.policies, strict=False)
        return {name: policy for name, policy in policies if policy.moves_images}

    def with_focus(self, focus: str | None) -> AdapterOptions:
        """The same with another focus, where one is given. Raises `ConfigError` where others exclude it."""
        if focus is None:
            return self
        options = replace(self, focus=focus)
        for conflict in _conflicts(options):
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
    def of_config(cls, source: ConfigSource, findings: Findings) -> AdapterOptions | None:
        """The table of a config over that of the environment; None where there are mistakes, all of which are added."""
        folder = Path() if source.path is None else source.path.parent
        of_this_config = [(source.line_of, rooted(source.data[TABLE], folder))] if TABLE in source.data else []
        try:
            return cls._merged([*environment_table(), *of_this_config], findings)
        except ConfigError as error:
            findings.error(_CODE, "", str(error))
            return None

    @classmethod
    def _merged(cls, tables: Iterable[tuple[str | LineOf, Any]], findings: Findings) -> AdapterOptions | None:
        merged: dict[str, Any] = {}
        places: dict[str, str] = {}
        mistakes = Findings()
        for place, table in tables:
            at = place if callable(place) else lambda *_, place=place: place
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
            options = cls(**merged)
            for conflict in _conflicts(options):
                mistakes.error(_CODE, places.get(conflict.split()[0], ""), f"[{TABLE}] {conflict}")
        findings.add(mistakes)
        return None if len(mistakes) else options


def _read_option(key: str, value: Any) -> Any:
    """An option's value as it is used. Raises `ConfigError` for an unknown key, or a value that is not allowed."""
    declared = {one.name: one.metadata for one in fields(AdapterOptions)}
    if key not in declared:
        raise ConfigError(f"[{TABLE}] has no option {key!r}; the nearest is {nearest(key, declared)!r}")
    return read_value(declared[key], f"[{TABLE}] {key}", value, ConfigError)


def required(options: AdapterOptions | None, findings: Findings, config: Path | None = None) -> AdapterOptions:
    """The options of a config; `ConfigError` with all mistakes in them where there are none."""
    if options is None:
        mistakes = "; ".join(finding.text for finding in findings if finding.code == _CODE)
        raise ConfigError(f"{config}: {mistakes}" if config else mistakes)
    return options


def _conflicts(options: AdapterOptions) -> Iterator[str]:
    """Which options exclude each other, and what to do: each text begins with the option at fault."""
    if options.resolutions is not None:
        yield from _conflicts_with_resolutions(options, options.resolutions)
    elif options.by_datasets and options.resolution_epochs is None:
        yield "resolution_mode is 'schedule' without resolution_epochs: say for how many epochs each, e.g. [4]"
    yield from without_effect(options)
    if options.max_tokens is not None and options.model is None:
        models = ", ".join(TOKEN_GRIDS)
        yield f"max_tokens is set without model, which says how many tokens an image has: one of {models}"
    if ORDERS[options.order].uses_shards:
        but = f"order is {options.order!r}, but"
        if options.latent_cache != "shards":
            remedy = "set latent_cache = 'shards' where the trainer takes it, or leave order out"
            yield f"{but} latents lie in files of their own: {remedy}"
        if options.resolutions is not None:
            yield f"{but} with resolutions the latents of an image lie in several shards: leave out one of them"
        if options.step_shapes == "equal_cost":
            yield f"{but} step_shapes = 'equal_cost' joins batches of several buckets in a step: leave out one of them"


def _conflicts_with_resolutions(options: AdapterOptions, resolutions: Sequence[Any]) -> Iterator[str]:
    mode, shares = options.resolution_mode, options.resolution_weights
    if RESOLUTION_MODES[mode].by_weight and shares is None:
        yield f"resolution_mode is {mode!r} without resolution_weights: say how often at which, e.g. [3, 1]"
    elif RESOLUTION_MODES[mode].by_schedule:
        try:
            stage_starts(options.resolution_epochs, len(resolutions))
        except PlanError as error:
            yield str(error)
    elif shares is not None and len(shares) != len(resolutions):
        numbers = counted(len(shares), "number")
        yield f"resolution_weights has {numbers} for {counted(len(resolutions), 'resolution')}"
    elif shares is not None:
        try:
            weighted_cycle(shares, len(shares))
        except PlanError as error:
            yield str(error)
    if named_rule(options.rule).own_sizes:
        others = listed((name for name, other in rule_choices().items() if not other.own_sizes), "or")
        yield (
            f"resolutions is set with rule {options.rule!r}, whose buckets do not follow from a resolution: use rule "
            f"{others}, or leave resolutions out"
        )


WHERE_PLACED = {
    "remainder", "merge_max_crop", "small_buckets", "order", "run_length", "largest_first", "step_shapes",
    "on_bad_image", "max_pixels", "max_tokens", "model", "resolution_mode", "resolution_epochs",
}  # fmt: skip
"""Options that have a place in a trainer that places, cuts and caches images itself."""


def placed_by_trainer(options: AdapterOptions, trainer: str, cached: str) -> Iterator[str]:
    """What to change, for other options than those of `WHERE_PLACED`.

    `cached` names the trainer's options by which latents are cached; an empty text where they are not.
    """
    for field in fields(options):
        if field.name not in WHERE_PLACED and getattr(options, field.name) != field.default:
            yield (
                f"[{TABLE}] {field.name} is set, but images are placed, cut and cached by {trainer} itself: leave it "
                f"out; {', '.join(sorted(WHERE_PLACED))} can be set"
            )
    if cached and options.moving:
        names = " and ".join(f"{name} = {policy.name!r}" for name, policy in options.moving.items())
        yield (
            f"[{TABLE}] {names} trains images at other sizes, but {trainer}'s cache keeps one size of each: use "
            f"'keep', 'pad' or 'drop', or train without {cached}"
        )


def rooted(table: Any, folder: Path) -> Any:
    """A `[kohya_bucket]` table whose relative `focus` begins at the folder of the config that it stands in."""
    focus = table.get("focus") if isinstance(table, Mapping) else None
    if not isinstance(focus, str) or focus in ("", BESIDE) or is_url(focus) or "\0" in focus:
        return table
    return {**table, "focus": os.path.join(folder.absolute(), focus)}  # noqa: PTH118


def environment_table() -> list[tuple[str, Mapping[str, Any]]]:
    """The options of the file named by `KOHYA_BUCKET_CONFIG`: none, or one (place, table) pair.

    The file is TOML or JSON; options stand in a `[kohya_bucket]` table or at the top level.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    if not name:
        return []
    path = Path(name)
    place = f"{ENVIRONMENT_VARIABLE}={name}"
    try:
        table = (parse_json if path.suffix.lower() == ".json" else parse_toml)(read_text(path))
    except KohyaBucketError as error:
        raise ConfigError(f"{place}: {error}") from error
    except FileNotFoundError as error:
        raise ConfigError(f"{place}: there is no such file; correct the variable or unset it") from error
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read: {error.strerror}; correct the variable or unset it") from error
    except ValueError as error:
        raise ConfigError(f"{place}: cannot be parsed: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: must hold a table of options, not {type(table).__name__}")
    return [(place, rooted(table.get(TABLE, table), path.parent))]


def store_folder(options: AdapterOptions, first_image: str | os.PathLike[str]) -> StorePath:
    """`latent_cache_dir`, or the folder `kohya_bucket_latents` beside a dataset's first image.

    Wherever training is started, it finds the same folder, and it moves along with the images.
    """
    if options.latent_cache_dir:
        from kohya_bucket.latents.store.storage import as_given

        return as_given(options.latent_cache_dir)
    return Path(first_image).absolute().parent / "kohya_bucket_latents"
