"""How other trainers place images, restated from their public behaviour so that a move can be judged beforehand.

Read-only: these rules plan nothing. The bucket of each image is the trainer's own; what is cropped is counted as
everywhere in this package, for an image scaled to cover its bucket, so that trainers can be compared. Each file
names its source; `compat_tests/test_other_trainers.py` compares with the real code where a checkout is present.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kohya_bucket.buckets.choices import Choice
from kohya_bucket.checks import one_of
from kohya_bucket.errors import ConfigError
from kohya_bucket.lazy import importer

if TYPE_CHECKING:
    from kohya_bucket.buckets.rule import BucketRule
    from kohya_bucket.buckets.trainers.ai_toolkit import AIToolkitBuckets
    from kohya_bucket.buckets.trainers.diffusers_dreambooth import DiffusersBuckets
    from kohya_bucket.buckets.trainers.diffusion_pipe import DiffusionPipeBuckets
    from kohya_bucket.buckets.trainers.everydream2 import EveryDream2Buckets
    from kohya_bucket.buckets.trainers.musubi_tuner import MusubiTunerBuckets
    from kohya_bucket.buckets.trainers.one_trainer import OneTrainerBuckets
    from kohya_bucket.buckets.trainers.simple_tuner import SimpleTunerBuckets

__all__ = [
    "TRAINERS",
    "AIToolkitBuckets",
    "DiffusersBuckets",
    "DiffusionPipeBuckets",
    "EveryDream2Buckets",
    "MusubiTunerBuckets",
    "OneTrainerBuckets",
    "SimpleTunerBuckets",
    "trainer_rule",
]

_HERE = "kohya_bucket.buckets.trainers"

TRAINERS: Mapping[str, Choice] = {
    "onetrainer": Choice(
        "nine aspects and their inverses at one area, quantised; nearest `h/w`",
        f"{_HERE}.one_trainer:OneTrainerBuckets",
    ),
    "simpletuner": Choice(
        "the aspect rounded to two decimals, at one area, sides rounded to the alignment",
        f"{_HERE}.simple_tuner:SimpleTunerBuckets",
    ),
    "ai-toolkit": Choice(
        "the own size reduced to the area, each side floored or raised, nearest area",
        f"{_HERE}.ai_toolkit:AIToolkitBuckets",
    ),
    "diffusion-pipe": Choice(
        "seven aspects from 0.5 to 2 in log space; nearest log aspect", f"{_HERE}.diffusion_pipe:DiffusionPipeBuckets"
    ),
    "musubi-tuner": Choice(
        "Kohya's idea from half the side on, step 16; no-upscale only floors",
        f"{_HERE}.musubi_tuner:MusubiTunerBuckets",
    ),
    "everydream2": Choice(
        "hand-picked sizes for 512, 768 and 1024; nearest `w/h`", f"{_HERE}.everydream2:EveryDream2Buckets"
    ),
    "diffusers": Choice(
        "`find_nearest_bucket`: least `abs(h * bucket_w - w * bucket_h)`, the last of equals",
        f"{_HERE}.diffusers_dreambooth:DiffusersBuckets",
    ),
}
"""The trainers by name. A home is the rule's class, which takes the side in pixels and is imported when it is used."""

_PLACES = [trainer.home.partition(":") for trainer in TRAINERS.values()]
if not TYPE_CHECKING:
    __getattr__ = importer(__name__, {module: [name] for module, _, name in _PLACES})


def trainer_rule(name: str, resolution: int) -> BucketRule:
    """A trainer's rule with its usual values at a side in pixels.

    Raises:
        ConfigError: there is no trainer of that name here.
    """
    rule: BucketRule = TRAINERS[one_of("trainer", name, TRAINERS, ConfigError)].load()(resolution)
    return rule
