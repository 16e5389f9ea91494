"""The choices that rules have: each name once, with what it means and where it is done.

Nothing is imported for them before it is used, so help texts cost no arrays.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


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
}
"""Which size an image gets with `bucket_no_upscale`."""

AUTO_METHODS: Mapping[str, Choice] = {
    "kmeans": Choice("clusters of aspects", f"{_HERE}.rules.auto:clusters"),
    "optimal": Choice("the set that crops least", f"{_HERE}.rules.auto:optimum"),
}
"""How a set is made from images. See `rules.auto` for what a home takes and gives."""


EXTRACTIONS: Mapping[str, Choice] = {
    "largest": Choice("from the start, the longest listed length that fits"),
    "head": Choice("from the start, every listed length that fits"),
    "chunk": Choice("one after the other, for every listed length"),
    "slide": Choice("every `stride` frames, for every listed length"),
    "uniform": Choice("`sample` of them spread evenly, for every listed length"),
    "full": Choice("from the start, as long as the grid and `max_frames` allow"),
}
"""Which runs of frames are taken from a clip."""


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
