"""Settings that are on or off take nothing else: a text such as "no" would count as on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kohya_bucket.buckets import ExactBuckets, FixedBuckets, KohyaBuckets, load_preset
from kohya_bucket.checks import as_flag
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import list_images, read_sizes
from kohya_bucket.originals.lopho import exact_batches
from kohya_bucket.planning import plan_epoch

IDS = [0, 0, 1]
SETTINGS: dict[str, Callable[[Any], object]] = {
    "equal_epochs": lambda value: plan_epoch(IDS, 2, equal_epochs=value),
    "shuffle_samples": lambda value: exact_batches(IDS, 2, shuffle_samples=value),
    "shuffle_batches": lambda value: exact_batches(IDS, 2, shuffle_batches=value),
    "drop_last": lambda value: exact_batches(IDS, 2, drop_last=value),
    "no_upscale": lambda value: KohyaBuckets(512, no_upscale=value),
    "no_upscale of a set": lambda value: FixedBuckets(load_preset("sdxl"), no_upscale=value),
    "no_upscale of exact": lambda value: ExactBuckets(512, no_upscale=value),
    "resize": lambda value: ExactBuckets(512, resize=value),
    "recursive": lambda value: list_images([], recursive=value),
}


@pytest.mark.parametrize("value", ["no", "false", "", None, 2, 0.5, [], np.array([True, False])], ids=repr)
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_neither_on_nor_off_is_refused(name: str, value: Any) -> None:
    with pytest.raises(KohyaBucketError, match=f"^{name.split()[0]} is .*must be True or False"):
        SETTINGS[name](value)


@pytest.mark.parametrize("name", SETTINGS)
def test_on_and_off_are_taken(name: str) -> None:
    for value in (True, False, np.True_, np.False_):
        SETTINGS[name](value)


def test_one_and_zero_count() -> None:
    assert [as_flag("x", value) for value in (1, 0, np.True_, np.False_)] == [True, False, True, False]


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers_are_refused(workers: int) -> None:
    with pytest.raises(KohyaBucketError, match=f"workers is {workers}"):
        read_sizes([], workers=workers)
