"""The comparison of rules."""

import numpy as np
import pytest

from kohya_bucket import AutoBuckets, ExactBuckets, KohyaBuckets
from kohya_bucket.buckets import Reason
from kohya_bucket.buckets.choices import TRAINERS
from kohya_bucket.originals.loaders import LOADERS, run_loader
from kohya_bucket.reports.analysis import analyze
from kohya_bucket.reports.compare import compare_rules, conclusion, trained_on
from kohya_bucket.reports.page import render_page
from kohya_bucket.trainers.door.subject import ImageTable, Subject

SIZES = np.random.default_rng(0).integers(300, 3000, (400, 2)).astype(np.int32)
RULES = {
    "kohya": KohyaBuckets(1024, 256, 2048),
    "kohya, largest": KohyaBuckets(1024, no_upscale=True, no_upscale_fit="largest"),
    "exact": ExactBuckets(1024),
    "auto": AutoBuckets.from_dims(SIZES),
    **{name: TRAINERS[name].load()(1024) for name in TRAINERS},
}


@pytest.mark.parametrize("name", RULES)
def test_the_numbers_add_up(name) -> None:
    rule = RULES[name]
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


def test_reasons_are_named() -> None:
    (result,) = compare_rules([("k", KohyaBuckets(512, max_crop=0.0))], np.array([(512, 512), (500, 77)], np.int32))
    assert result.reasons == {Reason.CROP_LIMIT.text: 1}
    assert result.as_dict()["rule"] == "k"


def test_the_conclusion_names_the_rule_that_loses_least() -> None:
    rules = {**RULES, "none": KohyaBuckets(1024, max_crop=0.0)}
    lost = {name: np.nan_to_num(rule.place(SIZES).crop_loss, nan=1.0).mean() for name, rule in rules.items()}
    best = min(lost, key=lost.__getitem__)
    assert conclusion(compare_rules([*rules.items()], SIZES)).startswith(f"{best} loses least")
    few, many = compare_rules([("none", rules["none"]), ("kohya", rules["kohya"])], SIZES)
    assert few.summary.mean_crop < many.summary.mean_crop  # of the few that it trains
    assert conclusion([few, many]).startswith("kohya loses least")


def test_a_report_shows_what_each_trainer_would_train_in_these_buckets() -> None:
    rule, table = RULES["kohya"], ImageTable.sized([f"{i}.png" for i in range(400)], SIZES)
    analysis = analyze(Subject("set", table, rule, 4))
    plan, *others = trained_on(analysis)
    assert plan == ("this plan", analysis.summary.batches, 0, 0, 0)
    compared = compare_rules([(name, rule) for name in LOADERS], SIZES, 4)
    runs = [(one.name, one.trained) for one in compared]
    assert others == [(name, run.steps, run.left_out, run.never, run.repeated) for name, run in runs]
    assert '"trainers":[["this plan",' in render_page([analysis], thumbnails=0)
    assert trained_on(analyze(Subject("set", table, rule, 1))) == []


@pytest.mark.parametrize("seed", range(3))
def test_trainers_are_asked_for_each_image_as_often_as_the_plan(seed) -> None:
    """sd-scripts has each image in its bucket as often as it is repeated, and cuts that into batches."""
    rng = np.random.default_rng(seed)
    sizes, repeats = SIZES[rng.permutation(400)[:80]], rng.integers(1, 7, 80)
    table = ImageTable.sized([f"{i}.png" for i in range(80)], sizes, repeats=repeats)
    analysis = analyze(Subject("set", table, RULES["kohya"], 4))
    shown = {name: row for name, *row in trained_on(analysis)}
    per_bucket = np.bincount(analysis.placement.bucket_index, repeats)
    assert shown["this plan"] == [-(-per_bucket // 4).sum(), 0, 0, 0]
    steps, left_out, *_ = shown["sd-scripts"]
    assert steps == shown["this plan"][0]
    assert left_out < 0.4 * repeats.sum()  # entries that its workers shuffle apart, and not most of the repeats
    single, repeated = (
        run_loader("onetrainer", [0] * 5 + [1], [1, 1], 2, repeats=times) for times in ([1] * 6, [1, 1, 1, 1, 1, 2])
    )
    assert (single.left_out, single.never, repeated.left_out, repeated.never) == (2, 1, 1, 0)
