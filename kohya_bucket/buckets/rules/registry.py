"""The rules by the names that config files and the command line use: each is declared here, once.

A rule is a class or a set somewhere in this folder, a function that makes it from a `RuleRequest`, and an entry in
`RULES`; an option of its own is a field of `RuleOptions` (`options.py`). Names, help texts, what is refused, and what
`compare` knows follow from the entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from kohya_bucket.buckets.choices import Choice, RuleOptions, listed
from kohya_bucket.checks import known_keyword, one_of
from kohya_bucket.errors import BucketSettingsError, ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from kohya_bucket.buckets.rule import BucketRule


@dataclass(frozen=True, kw_only=True)
class NamedRule(Choice):
    """A rule that is chosen by name; `home` makes it from a `RuleRequest`.

    Attributes:
        argument: what is written after the name and a colon, e.g. NAME; empty where there is none.
        accepted_options: those that mean something to it. Others are refused.
        own_sizes: its buckets follow from no resolution, limit or step.
        from_images: it is made from the sizes of all images.
        variants: further names for `compare`, with what they change of the options.
    """

    argument: str = ""
    accepted_options: frozenset[str] = frozenset({"no_upscale", "max_crop", "switching"})
    own_sizes: bool = False
    from_images: bool = False
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def not_taken(self) -> dict[str, Any]:
        """The options that mean nothing to it, at their defaults: where they are for another rule beside it."""
        return {one.name: one.default for one in fields(RuleOptions) if one.name not in self.accepted_options}


_HERE = "kohya_bucket.buckets.rules"
_ALL = NamedRule.accepted_options

RULES: dict[str, NamedRule] = {
    "kohya": NamedRule(
        text="as sd-scripts", home=f"{_HERE}.kohya:kohya_rule", accepted_options=_ALL | {"no_upscale_fit"},
        variants={
            "kohya-no-upscale": {"bucket_no_upscale": True},
            "kohya-largest": {"bucket_no_upscale": True, "no_upscale_fit": "largest"},
            "kohya-standard": {"bucket_no_upscale": True, "no_upscale_fit": "standard"},
        },
    ),
    "novelai": NamedRule(text="NovelAI's set", home=f"{_HERE}.novelai:novelai_rule"),
    "token_band": NamedRule(
        text="all sizes of about as many tokens", home=f"{_HERE}.token_band:token_band_rule",
        accepted_options=_ALL | {"token_tolerance"},
    ),
    "exact": NamedRule(
        text="a bucket for each size", home=f"{_HERE}.exact:exact_rule", accepted_options=_ALL - {"switching"},
    ),
    "auto": NamedRule(
        text="a set made from the images", home=f"{_HERE}.auto:auto_rule",
        accepted_options=_ALL | {"num_buckets", "auto_method"}, from_images=True,
        variants={"auto-optimal": {"auto_method": "optimal"}},
    ),
    "preset": NamedRule(text="a bundled set", home=f"{_HERE}.fixed:preset_rule", argument="NAME", own_sizes=True),
    "file": NamedRule(text="a set in a TOML or JSON file", home=f"{_HERE}.fixed:file_rule", argument="PATH",
                      own_sizes=True),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RuleRequest(RuleOptions):
    """sd-scripts' keys and the options of rules, as `rule_from_name` explains them.

    Attributes:
        argument: what stands after the colon of the name, e.g. that of the preset.
        sizes: [N, 2] sizes of the data; None where none were given.
    """

    argument: str
    max_reso: tuple[int, int]
    min_size: int
    max_size: int
    reso_steps: int
    no_upscale: bool
    sizes: npt.ArrayLike | None

    @property
    def set_options(self) -> dict[str, Any]:
        """The options for a rule with a set; without `switching` it is the rule's own."""
        switching = {} if self.switching is None else {"switching": self.switching}
        return {"no_upscale": self.no_upscale, "max_crop": self.max_crop, **switching}


def rule_choices() -> dict[str, NamedRule]:
    """The rules by their names as they are written: `kohya`, `preset:NAME`."""
    return {f"{kind}:{rule.argument}" if rule.argument else kind: rule for kind, rule in RULES.items()}


def named_rule(name: str) -> NamedRule:
    """What a name stands for.

    Raises:
        ConfigError: nothing, with the nearest name and all of them.
    """
    from kohya_bucket.buckets.set_files import list_presets

    rules = rule_choices()
    if name not in rules and name in list_presets():
        raise ConfigError(f"rule is {name!r}, which is a bucket set: write 'preset:{name}'")
    return rules[one_of("rule", _as_listed(name), rules, ConfigError)]


def is_rule(name: object) -> bool:
    """Whether `named_rule` knows it."""
    return isinstance(name, str) and _as_listed(name) in rule_choices()


def _as_listed(name: str) -> str:
    """`preset:sdxl` as `preset:NAME`, and all else as it is."""
    kind, _, argument = name.partition(":")
    return next((one for one in rule_choices() if argument and one.startswith(f"{kind}:")), name)


def rule_from_name(
    name: str,
    *,
    max_reso: tuple[int, int] | int,
    min_size: int = 256,
    max_size: int | None = None,
    reso_steps: int = 64,
    no_upscale: bool = False,
    sizes: npt.ArrayLike | None = None,
    **options: Any,
) -> BucketRule:
    """The rule that a name stands for, with sd-scripts' bucket keys.

    Args:
        name: `kohya`, `novelai`, `exact`, `auto`, `preset:NAME` or `file:PATH` (TOML, or JSON by its suffix).
        max_reso: (width, height) in pixels whose area no generated bucket exceeds; an int means a square.
        min_size: sd-scripts' `min_bucket_reso`; `kohya` and `exact` ignore it with `no_upscale`, as sd-scripts does.
        max_size: `max_bucket_reso`, the same; by default that of `KohyaBuckets`.
        reso_steps: `bucket_reso_steps`; presets and files ignore it, and the two limits.
        no_upscale: `bucket_no_upscale`.
        sizes: [N, 2] sizes of the data, needed by `auto`; rows with a side below 1 are left out.
        options: those of `RuleOptions`, e.g. `max_crop=0.05`. `exact` compares no aspects and refuses `switching`; only
            `kohya` without upscaling has `no_upscale_fit`.

    Raises:
        ConfigError: there is no such rule, preset or key in the file.
        TypeError: there is no such option.
        BucketSettingsError: values that do not work, or do nothing for this rule.
        FileNotFoundError: no such file.

    Examples:
        >>> rule = rule_from_name("kohya", max_reso=1024)
        >>> rule.assign(4000, 1000)
        Bucket(width=2048, height=512)
        >>> rule_from_name("preset:sdxl", max_reso=1024, max_crop=0.05)
        <FixedBuckets 'sdxl' n_buckets=9 switching='geometric'>
    """
    from kohya_bucket.buckets.sizes import as_resolution, check_steps, longest_side

    rule = named_rule(name)
    known_keyword("rule_from_name", options, RuleOptions.names())
    max_reso, reso_steps = as_resolution("resolution", max_reso), check_steps(reso_steps)
    longest = longest_side(max_reso, reso_steps) if max_size is None else max_size
    request = RuleRequest(
        argument=name.partition(":")[2], max_reso=max_reso, min_size=min_size, max_size=longest, reso_steps=reso_steps,
        no_upscale=no_upscale, sizes=sizes, **options,
    )  # fmt: skip
    _refuse_unused(name, rule, request)
    made: BucketRule = rule.load()(request)
    return made


def _refuse_unused(name: str, rule: NamedRule, request: RuleRequest) -> None:
    if rule.from_images and request.sizes is None:
        raise BucketSettingsError(f"rule {name!r} makes its buckets from the images, but no sizes were given")
    unset = {one.name: (one.default, one.metadata.get("same")) for one in fields(RuleOptions)}
    for option, values in {**unset, "no_upscale": (False,)}.items():
        value = getattr(request, option)
        if option not in rule.accepted_options and value not in values:
            having = [one for one, other in rule_choices().items() if option in other.accepted_options]
            what = f"the rule{'s' * (len(having) > 1)} {listed(having)} {'has' if len(having) == 1 else 'have'}"
            raise BucketSettingsError(f"{option} is {value!r}, which only {what}: leave it out with rule {name!r}")
