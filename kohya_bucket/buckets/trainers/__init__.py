"""How other trainers place images, restated from their public behaviour so that a move can be judged beforehand.

Read-only: these rules plan nothing. The bucket of each image is the trainer's own; what is cropped is counted as
everywhere in this package, for an image scaled to cover its bucket, so that trainers can be compared. Each file
names its source; `compat_tests/test_other_trainers.py` compares with the real code where a checkout is present.
"""

from collections.abc import Callable

from kohya_bucket.buckets.trainers.ai_toolkit import AIToolkitBuckets
from kohya_bucket.buckets.trainers.diffusers_dreambooth import DiffusersBuckets
from kohya_bucket.buckets.trainers.diffusion_pipe import DiffusionPipeBuckets
from kohya_bucket.buckets.trainers.everydream2 import EveryDream2Buckets
from kohya_bucket.buckets.trainers.musubi_tuner import MusubiTunerBuckets
from kohya_bucket.buckets.trainers.one_trainer import OneTrainerBuckets
from kohya_bucket.buckets.trainers.simple_tuner import SimpleTunerBuckets
from kohya_bucket.buckets.types import BucketRule
from kohya_bucket.errors import ConfigError

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

TRAINERS: dict[str, Callable[[int], BucketRule]] = {
    "onetrainer": OneTrainerBuckets,
    "simpletuner": SimpleTunerBuckets,
    "ai-toolkit": AIToolkitBuckets,
    "diffusion-pipe": DiffusionPipeBuckets,
    "musubi-tuner": MusubiTunerBuckets,
    "everydream2": EveryDream2Buckets,
    "diffusers": DiffusersBuckets,
}


def trainer_rule(name: str, resolution: int) -> BucketRule:
    """A trainer's rule with its usual settings at a side in pixels.

    Raises:
        ConfigError: there is no trainer of that name here.
    """
    if name not in TRAINERS:
        raise ConfigError(f"there is no trainer {name!r}; there are {', '.join(TRAINERS)}")
    return TRAINERS[name](resolution)
