"""How other trainers place images, restated from their public behaviour so that a move can be judged beforehand.

Read-only: these rules plan nothing. The bucket of each image is the trainer's own; what is cropped is counted as
everywhere in this package, for an image scaled to cover its bucket, so that trainers can be compared. Each file
names its source; `compat_tests/test_other_trainers.py` compares with the real code where a checkout is present.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

TRAINERS = {
    "onetrainer": ("one_trainer", "OneTrainerBuckets"),
    "simpletuner": ("simple_tuner", "SimpleTunerBuckets"),
    "ai-toolkit": ("ai_toolkit", "AIToolkitBuckets"),
    "diffusion-pipe": ("diffusion_pipe", "DiffusionPipeBuckets"),
    "musubi-tuner": ("musubi_tuner", "MusubiTunerBuckets"),
    "everydream2": ("everydream2", "EveryDream2Buckets"),
    "diffusers": ("diffusers_dreambooth", "DiffusersBuckets"),
}
"""Name -> the file here and the rule in it, which is imported when it is used."""

_class_of = importer(__name__, {f"{__name__}.{file}": [rule] for file, rule in TRAINERS.values()})
if not TYPE_CHECKING:
    __getattr__ = _class_of


def trainer_rule(name: str, resolution: int) -> BucketRule:
    """A trainer's rule with its usual settings at a side in pixels.

    Raises:
        ConfigError: there is no trainer of that name here.
    """
    if name not in TRAINERS:
        raise ConfigError(f"there is no trainer {name!r}; there are {', '.join(TRAINERS)}")
    rule: BucketRule = _class_of(TRAINERS[name][1])(resolution)
    return rule
