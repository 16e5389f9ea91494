"""The comparison of rules."""

import numpy as np
import pytest

from kohya_bucket import ConfigError, KohyaBuckets, Reason
from kohya_bucket.buckets.trainers import TRAINERS
from kohya_bucket.reports.compare import GROUPS, comparable_rule, compare_rules

SIZES = np.random.default_rng(0).integers(300, 3000, (400, 2)).astype(np.int32)
SETTINGS = {"max_reso": (1024, 1024), "min_size": 256, "max_size": 2048, "reso_steps": 64}


@pytest.mark.parametrize("name", GROUPS["all"])
def test_every_name_makes_a_rule_and_its_numbers_add_up(name) -> None:
    rule = comparable_rule(name, SIZES, **SETTINGS)
    unreadable = np.concatenate([SIZES, [(0, 0)]]).astype(np.int32)
    (result,) = compare_rules([(name, rule)], unreadable, batch_size=4)
    summary, placement = result.summary, rule.place(SIZES)
    assert summary.placed == placement.placed.sum()
    assert summary.placed + summary.unplaced == len(SIZES)
    assert sum(result.reasons.values()) == summary.unplaced
    counts = np.bincount(placement.bucket_index[placement.placed])
    assert summary.batches == sum(-(-n // 4) for n in counts)
    assert summary.short_batches == sum(1 for n in counts if n % 4)
    assert summary.mean_crop == pytest.approx(placement.crop_loss[placement.placed].mean())
    assert summary.worst_crop == placement.crop_loss[placement.placed].max()


def test_the_rules_are_those_of_their_names() -> None:
    largest = comparable_rule("kohya-largest", SIZES, **SETTINGS)
    assert (largest.no_upscale, largest.no_upscale_fit) == (True, "largest")
    assert comparable_rule("auto-optimal", SIZES, **SETTINGS, num_buckets=3).result.method == "optimal"
    assert comparable_rule("exact", SIZES, **SETTINGS, switching="area").max_side == 2048
    assert comparable_rule("kohya", SIZES, **SETTINGS, switching="area").switching == "area"
    assert type(comparable_rule("onetrainer", SIZES, **SETTINGS)) is TRAINERS["onetrainer"]
    with pytest.raises(ConfigError, match="no rule 'konya'"):
        comparable_rule("konya", SIZES, **SETTINGS)


def test_reasons_are_named() -> None:
    (result,) = compare_rules([("k", KohyaBuckets(512, max_crop=0.0))], np.array([(512, 512), (500, 77)], np.int32))
    assert result.reasons == {Reason.CROP_LIMIT.text: 1}
    assert result.as_dict()["rule"] == "k"
