"""The options that rules have beyond sd-scripts' keys, and their choices: each once, with what it means.

`rule_from_name`, the `[kohya_bucket]` table and the command line take them from here, without importing any arrays.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kohya_bucket.checks import whole_number
from kohya_bucket.options import choice, option, share


@dataclass(frozen=True)
class Choice:
    """One of several ways to do something.

    Attributes:
        text: what it is, in a few words, for help texts and the documentation.
        home: "module:function" that does it; empty where the name says it all to the code.
    """

    text: str
    home: str = ""

    def load(self) -> Any:
        """What stands at `home`."""
        module, _, name = self.home.partition(":")
        return getattr(importlib.import_module(module), name)


_HERE = "kohya_bucket.buckets"

SWITCHING_METHODS: Mapping[str, Choice] = {
    "midpoint": Choice("halfway between two aspects, as sd-scripts", f"{_HERE}.switching:midpoint"),
    "geometric": Choice("where both buckets crop the same share", f"{_HERE}.switching:geometric"),
    "area": Choice("by area less what is cropped off", f"{_HERE}.switching:area"),
}
"""Where one bucket hands over to the next. A home takes a bucket set and [M] positions in it in ascending aspect, and
gives the [M - 1] aspects between them."""

NO_UPSCALE_FITS: Mapping[str, Choice] = {
    "kohya": Choice("as sd-scripts"),
    "largest": Choice("the largest size that crops no more"),
    "standard": Choice("the bucket it would get with upscaling, if the image fills it; crops more"),
}
"""Which size an image gets with `bucket_no_upscale`."""

AUTO_METHODS: Mapping[str, Choice] = {
    "kmeans": Choice("clusters of aspects", f"{_HERE}.rules.auto:clusters"),
    "optimal": Choice("the set that crops least", f"{_HERE}.rules.auto:optimum"),
}
"""How a set is made from images. See `rules.auto` for what a home takes and gives."""

TRAINERS: Mapping[str, Choice] = {
    "onetrainer": Choice(
        "nine aspects and their inverses at one area, quantised; nearest `h/w`", f"{_HERE}.trainers:OneTrainerBuckets"
    ),
    "simpletuner": Choice(
        "the aspect rounded to two decimals, at one area, sides rounded to the alignment",
        f"{_HERE}.trainers:SimpleTunerBuckets",
    ),
    "ai-toolkit": Choice(
        "the own size reduced to the area, each side floored or raised, nearest area",
        f"{_HERE}.trainers:AIToolkitBuckets",
    ),
    "diffusion-pipe": Choice(
        "seven aspects from 0.5 to 2 in log space; nearest log aspect", f"{_HERE}.trainers:DiffusionPipeBuckets"
    ),
    "musubi-tuner": Choice(
        "Kohya's idea from half the side on, step 16; no-upscale only floors", f"{_HERE}.trainers:MusubiTunerBuckets"
    ),
    "everydream2": Choice(
        "hand-picked sizes for 512, 768 and 1024; nearest `w/h`", f"{_HERE}.trainers:EveryDream2Buckets"
    ),
    "diffusers": Choice(
        "`find_nearest_bucket`: least `abs(h * bucket_w - w * bucket_h)`, the last of equals",
        f"{_HERE}.trainers:DiffusersBuckets",
    ),
}
"""Other trainers. A home is the class of the rule, which takes the side in pixels."""


def described(choices: Mapping[str, Choice]) -> str:
    """Names with their texts, for a help text."""
    return "; ".join(f"{name}: {choice.text}" for name, choice in choices.items())


def listed(names: Iterable[str], last: str = "and") -> str:
    """`a, b and c`."""
    *most, end = names
    return f"{', '.join(most)} {last} {end}" if most else end


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """What a user may choose for a rule.

    A field's metadata has `help`, the text of its option on the command line, `spelled`, further spellings there,
    `usual` for one that `--help` shows, and `same`, a value that asks of a rule without the option what the default
    asks of it.

    Attributes:
        switching: where one bucket hands over to the next: `midpoint`, `geometric` or `area`; by default the rule's
            own: midpoint for `kohya` and `novelai`, geometric for the others.
        no_upscale_fit: with `bucket_no_upscale`, `largest` keeps the most of each image's pixels where sd-scripts
            (`kohya`) sometimes takes a smaller bucket than would fit; `standard` keeps to the usual buckets where
            images fill them, which makes fewer and crops more.
        max_crop: largest share of an image that may be cropped off, e.g. 0.05; images beyond it are moved to a
            better bucket or left out by name.
        token_tolerance: by how much of its tokens an image of rule `token_band` may differ from the resolution, e.g.
            0.05.
        num_buckets: how many buckets rule `auto` makes.
        auto_method: how rule `auto` finds them: `kmeans` or `optimal`.
    """

    switching: str | None = choice(
        None, lambda: SWITCHING_METHODS, same="midpoint",
        help=lambda: f"{described(SWITCHING_METHODS)}. Default: the rule's own.",
    )  # fmt: skip
    no_upscale_fit: str = choice("kohya", lambda: NO_UPSCALE_FITS, help=lambda: f"{described(NO_UPSCALE_FITS)}.")
    max_crop: float | None = option(None, share, usual=True, help="Most that may be cut off, e.g. 0.05.")
    token_tolerance: float = option(0.05, share, help="For token_band: a bucket's tokens differ by at most this share.")
    num_buckets: int = option(
        8, whole_number(1), int, spelled=("--num-buckets", "--num", "-n"), usual=True,
        help="How many the rule auto makes.",
    )  # fmt: skip
    auto_method: str = choice("kmeans", lambda: AUTO_METHODS)

    @classmethod
    def names(cls) -> list[str]:
        """The names of the options of rules, without those that a class derived from this one adds."""
        return [one.name for one in fields(RuleOptions)]

    def of_rules(self) -> dict[str, Any]:
        """These options by name, as keyword arguments of `rule_from_name`."""
        return {name: getattr(self, name) for name in self.names()}
