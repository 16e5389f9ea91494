"""The analysis counts what is there, and recommendations carry measured numbers."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kohya_bucket import AutoBuckets, BucketSet, FixedBuckets, KohyaBuckets, load_preset
from kohya_bucket.buckets.rules.registry import rule_from_name
from kohya_bucket.cli.analysis_view import print_analysis
from kohya_bucket.reports.analysis import analyze
from kohya_bucket.reports.output import report_as_dict
from kohya_bucket.reports.recommend import changes, recommend
from kohya_bucket.trainers.door.subject import ImageTable, Subject
from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER, trainer_named

RULES = [
    KohyaBuckets(1024, 256, 2048),
    KohyaBuckets(512, no_upscale=True),
    FixedBuckets(load_preset("sdxl"), max_crop=0.1),
    FixedBuckets(load_preset("novelai"), no_upscale=True),
]


def table(sizes, **columns) -> ImageTable:
    array = np.array(sizes, dtype=np.int32).reshape(-1, 2)
    return ImageTable.sized([f"/data/set/{i:03}.png" for i in range(len(array))], array, **columns)


sides = st.integers(0, 4000)


@given(st.lists(st.tuples(sides, sides), max_size=40), st.sampled_from(RULES), st.integers(1, 9), st.data())
def test_counts_add_up(sizes, rule, batch_size, data) -> None:
    repeats = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes))), dtype=np.int64)
    a = analyze(Subject("set", table(sizes, repeats=repeats), rule, batch_size))
    readable = sum(min(s) > 0 for s in sizes)
    assert a.summary.placed + len(a.unplaced) == readable == len(a.aspects)
    assert sum(b.images for b in a.buckets) == a.summary.placed
    assert sum(b.samples for b in a.buckets) == a.summary.samples == repeats[a.placement.placed].sum()
    assert sum(b.batches for b in a.buckets) == a.summary.batches
    assert sum(b.last_batch > 0 for b in a.buckets) == a.summary.short_batches
    assert {str(b.bucket) for b in a.underfilled} == {str(b.bucket) for b in a.buckets if 0 < b.samples < batch_size}
    for use in a.used_buckets:
        mine = a.placement.bucket_index == a.placement.bucket_set.index_of(use.bucket)
        assert use.worst_crop == a.placement.crop_loss[mine].max()
        assert use.mean_crop == pytest.approx(a.placement.crop_loss[mine].mean())
    losses = a.placement.crop_loss[a.most_cropped]
    assert (np.diff(losses) <= 0).all()
    assert (losses > 0).all()


@pytest.mark.long
@given(st.lists(st.tuples(sides, sides), max_size=30), st.sampled_from(RULES))
def test_json_is_plain_stable_and_printable(sizes, rule) -> None:
    analysis = analyze(Subject("set", table(sizes), rule, 4))
    data = report_as_dict([analysis])
    again = json.loads(json.dumps(data, allow_nan=False))
    assert again["format"] == "kohya-bucket-analysis"
    assert again["version"] == 1
    (one,) = again["datasets"]
    assert one["images"]["found"] == len(sizes)
    print_analysis(analysis, Console(file=io.StringIO()))


def test_the_keys_of_the_json_format() -> None:
    (one,) = report_as_dict([analyze(Subject("set", table([(900, 700)]), RULES[0]))])["datasets"]
    assert list(one) == [
        "name", "rule", "source", "batch_size", "clips", "images", "aspects", "summary", "buckets", "underfilled",
        "rarely_used", "broken", "not_listed", "misread", "without_bucket", "outliers", "most_cropped",
        "most_enlarged", "focus", "exif_rotated", "mislabelled", "duplicates", "recommendations",
    ]  # fmt: skip


def test_an_outlier_is_far_from_its_bucket() -> None:
    a = analyze(Subject("set", table([(1000, 1000), (4000, 100), (800, 600)]), RULES[0]))
    assert a.outliers.tolist() == [1]
    assert a.aspect_distance[1] == pytest.approx(math.log(40) - math.log(2048 / 512), rel=0.5)
    assert np.isclose(1 - np.exp(-a.aspect_distance[1]), a.placement.crop_loss[1], atol=0.01)


def test_enlargement_is_the_factor_of_the_longer_side() -> None:
    a = analyze(Subject("set", table([(512, 512), (2048, 2048), (1024, 1024)]), RULES[0]))
    assert a.scale.tolist() == [2.0, 0.5, 1.0]
    assert a.most_enlarged.tolist() == [0]


def test_duplicates_are_grouped_by_hash() -> None:
    images = table([(800, 600)] * 5)
    images = ImageTable(images.paths, images.sizes, images.repeats, images.orientation, hashes=["a", "b", "a", "", ""])
    analysis = analyze(Subject("set", images, RULES[0]))
    assert analysis.duplicates == [[0, 2]]
    (advice,) = [r for r in recommend(analysis) if r.current == "1 copy"]
    assert "5 → 4" in advice.gain


def test_advice_on_files_begins_with_what_harms_most() -> None:
    sizes = [(1200, 900)] * 60 + [(200, 200)] * 5 + [(0, 0)] * 2
    orientation = np.array([6] * 18 + [1] * 49, np.uint8)
    hashes = ["a"] * 40 + [f"{n}" for n in range(27)]
    images = table(sizes, orientation=orientation, hashes=hashes, failures={65: "cut off", 66: "cut off"})
    advice = [one for one in recommend(analyze(Subject("set", images, RULES[0]))) if one.setting == "files"]
    assert [(one.listed, one.harm) for one in advice] == [
        ("broken", "not trained"), ("exif_rotated", "harms training"), ("most_enlarged", "harms training"),
        ("duplicates", "worth a look"),
    ]  # fmt: skip


def test_long_images_ask_for_a_longer_bucket_and_get_what_was_promised() -> None:
    sizes = [(1800, 600)] * 60 + [(1000, 1000)] * 60
    a = analyze(Subject("set", table(sizes), KohyaBuckets(1024, 256, 1024), 4))
    advice = {r.setting: r for r in recommend(a)}
    longer = advice["max_bucket_reso"]
    assert longer.current == "1024"
    tried = analyze(Subject("set", table(sizes), KohyaBuckets(1024, 256, int(longer.proposed)), 4))
    assert longer.after == tried.summary
    assert longer.after.mean_crop < a.summary.mean_crop


def test_small_images_ask_for_a_lower_resolution() -> None:
    a = analyze(Subject("set", table([(700, 720 + i) for i in range(100)]), KohyaBuckets(1024, 256, 2048), 4))
    advice = {r.setting: r for r in recommend(a)}
    lower = advice["resolution"]
    assert lower.before.enlarged == 1.0
    assert lower.after.enlarged <= 0.05
    assert analyze(Subject("set", a.images, KohyaBuckets(int(lower.proposed), 256, 2048), 4)).summary == lower.after


def test_without_upscaling_the_largest_fit_is_proposed_where_it_keeps_more() -> None:
    a = analyze(Subject("set", table([(3072, 3000 + i) for i in range(40)]), KohyaBuckets(1024, no_upscale=True), 4))
    advice = {r.setting: r for r in recommend(a)}
    fit = advice["[kohya_bucket] no_upscale_fit"]
    assert fit.proposed == "largest"
    assert fit.after.mean_pixels > fit.before.mean_pixels


def test_without_upscaling_the_usual_buckets_are_proposed_where_they_fill_batches() -> None:
    sizes = np.random.default_rng(0).integers(1000, 3000, (300, 2)).astype(np.int32)
    rule = KohyaBuckets(1024, reso_steps=16, no_upscale=True)
    advice = advised(rule, sizes, batch_size=4)["[kohya_bucket] no_upscale_fit"]
    assert advice.proposed == "standard"
    assert advice.after.short_batches < advice.before.short_batches


def test_the_usual_buckets_are_proposed_only_where_they_are_fewer_and_with_what_they_cost() -> None:
    proposed = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(200, rng.choice([600, 2500]), (60, 2)).astype(np.int32)
        rule = KohyaBuckets(1024, no_upscale=True)
        for change in changes(rule, ANY_TRAINER, sizes, 0.0):
            if change.proposed == "standard":
                proposed += 1
                used = [len(np.unique(one.place(sizes).bucket_sizes, axis=0)) for one in (rule, change.rule)]
                assert used[1] < used[0]
    assert 0 < proposed < 30
    rule = KohyaBuckets(1024, reso_steps=16, no_upscale=True)
    advice = advised(rule, np.random.default_rng(0).integers(1000, 3000, (300, 2)).astype(np.int32), batch_size=4)
    assert "mean crop loss" in advice["[kohya_bucket] no_upscale_fit"].cost


def test_images_lying_on_their_side_are_named() -> None:
    images = table([(1500, 1000)] * 3, orientation=np.array([6, 1, 3], dtype=np.uint8))
    a = analyze(Subject("set", images, RULES[0]))
    assert a.rotated.tolist() == [0, 2]
    (advice,) = [r for r in recommend(a) if r.setting == "files"]
    assert advice.current.startswith("2 turned or")
    assert "1 a quarter turn clockwise; 1 upside down" in advice.why
    assert "1 of them in another bucket" in advice.gain
    assert not advice.cost


def test_rectangles_must_be_turned_with_their_images() -> None:
    images = table([(1100, 900)], orientation=np.array([6], dtype=np.uint8))
    subject = Subject("set", images, RULES[0], focus=np.array([(0.0, 0.0, 0.6, 1.0)]))
    (advice,) = [r for r in recommend(analyze(subject)) if r.listed == "exif_rotated"]
    assert advice.cost == "1 focus rectangle must be turned with them"


def test_no_setting_is_recommended_that_trains_nothing() -> None:
    """A strip of a few pixels has no bucket without upscaling, so nothing of it would be cropped."""
    found = recommend(analyze(Subject("set", table([(4000, 8)] * 3), KohyaBuckets(512))))
    assert all(r.after.placed for r in found if r.setting != "files")


@pytest.mark.parametrize("sizes", [[(768, 512), (512, 768), (600, 400)], [(384, 256), (300, 200), (200, 300)]])
def test_without_upscaling_is_not_advised_where_a_limit_of_sides_is_what_cuts(sizes) -> None:
    found = recommend(analyze(Subject("set", table(sizes * 3), KohyaBuckets(256))))  # min_bucket_reso is 256 too
    settings = [one.setting for one in found if one.setting != "files"]
    assert settings[0] == "min_bucket_reso"
    assert "bucket_no_upscale" not in settings


def test_a_good_set_asks_for_nothing() -> None:
    rule = KohyaBuckets(1024, 256, 2048)
    sizes = [b.as_tuple() for b in rule.bucket_set for _ in range(8)]
    assert recommend(analyze(Subject("set", table(sizes), rule, 4))) == []


@pytest.mark.parametrize(
    ("paths", "short"),
    [
        (["/a/b/c/1.png", "/a/b/d/2.png"], ["c/1.png", "d/2.png"]),
        (["/a/b/10.png", "/a/b/1.png"], ["10.png", "1.png"]),
        (["/a/b/1.png"], ["1.png"]),
        (["/a/1.png", "/b/1.png"], ["a/1.png", "b/1.png"]),
        ([r"C:\set\x\1.png", r"C:\set\x2\1.png"], ["x/1.png", "x2/1.png"]),
        (["x\\y.png", "x\\z.png"], ["x\\y.png", "x\\z.png"]),
    ],
)
def test_short_names_drop_the_shared_folder(paths, short) -> None:
    images = ImageTable.sized(paths, np.ones((len(paths), 2), dtype=np.int32))
    assert [images.short_name(i) for i in range(len(paths))] == short


def test_in_a_file_no_line_is_cut_or_filled_up() -> None:
    analysis = analyze(Subject("set", table([(900, 700), (3000, 100)] * 20), FixedBuckets(load_preset("sdxl")), 4))
    out = io.StringIO()
    print_analysis(analysis, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    for r in recommend(analysis):
        for text in (f"  {r.setting}: {r.current} → {r.proposed}", f"  {r.why}.", f"  Gain: {r.gain}"):
            assert text in lines or text == "  Gain: "
    assert max(map(len, lines)) > 80
    assert lines == [line.rstrip() for line in lines]


def test_the_terminal_table_fits_into_eighty_columns() -> None:
    out = io.StringIO()
    images = table([(900 + i, 700) for i in range(2000)], repeats=np.full(2000, 20))
    print_analysis(analyze(Subject("set", images, KohyaBuckets(1024, 256, 2048), 16)), Console(file=out, width=80))
    assert "…" not in out.getvalue().split("What to change")[0].split("Enlarged most")[0]
    assert "1152x896" in out.getvalue()


def advised(rule, sizes, **options):
    a = analyze(Subject("set", table(sizes), rule, **options))
    return {r.setting: r for r in recommend(a)}


def test_settings_that_exclude_each_other_are_proposed_together() -> None:
    rule = KohyaBuckets(1024, no_upscale=True, no_upscale_fit="largest")
    advice = advised(rule, [(50, 1000), (800, 600), (20, 20)])
    both = advice["bucket_no_upscale and [kohya_bucket] no_upscale_fit"]
    assert (both.current, both.proposed) == ("true and largest", "false and none")
    assert "bucket_no_upscale" not in advice


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (FixedBuckets(load_preset("sdxl"), switching="midpoint"), "preset:sdxl"),
        (AutoBuckets.from_dims(np.array([(500, 1500), (1500, 500)]), num_buckets=2), "auto"),
        (FixedBuckets(BucketSet.from_dims([(1024, 1024)])), "own set"),
    ],
)
def test_another_set_is_proposed_under_the_name_that_the_setting_takes(rule, name) -> None:
    advice = advised(rule, [(1000, 1000 + 13 * i) for i in range(60)])
    change = advice["[kohya_bucket] rule"]
    assert change.current == name
    tried = rule_from_name(change.proposed, max_reso=1024, switching=rule.switching)
    assert analyze(Subject("set", table([(1000, 1000 + 13 * i) for i in range(60)]), tried)).summary == change.after


def test_what_is_promised_without_copies_is_what_remains() -> None:
    sizes = [(900, 700), (900, 700), (300, 1100), (300, 1100), (300, 1100), (640, 640)]
    images = replace(table(sizes), hashes=["a", "a", "b", "b", "b", "c"])
    rule = KohyaBuckets(1024, 256, 2048)
    (advice,) = [r for r in recommend(analyze(Subject("set", images, rule, 2))) if "copies" in r.current]
    assert advice.after == analyze(Subject("set", table([sizes[i] for i in (0, 2, 5)]), rule, 2)).summary


def test_where_nothing_is_placed_a_change_costs_nothing() -> None:
    advice = advised(KohyaBuckets(1024, no_upscale=True), [(50, 1000)], programs=trainer_named("sdxl"))
    assert advice["bucket_reso_steps"].gain == "images without a bucket 1 → 0"
    assert advice["bucket_reso_steps"].cost == ""


def test_names_are_printed_as_they_are() -> None:
    names = ["/d/a:smile:[bold]b.png", "/d/[/]:cat:.png"]
    out = io.StringIO()
    sizes = np.zeros((2, 2), np.int32)
    images = replace(ImageTable.sized(names, sizes), failures={0: "[red]empty[/red]", 1: ":x:"})
    print_analysis(analyze(Subject(":cat:[b]", images, RULES[0])), Console(file=out, width=80))
    for text in ("a:smile:[bold]b.png: [red]empty[/red]", "[/]:cat:.png: :x:", ":cat:[b]"):
        assert text in out.getvalue()


@pytest.mark.long
@pytest.mark.parametrize(("arch", "least"), [("sd", 64), ("SD 1.5", 64), ("sdxl", 32), ("sd3", 32), ("flux", 32),
                                             ("hunyuan_image", 32), ("lumina", 16), ("anima", 16),
                                             ("flux_train.py", 16), ("sd3_train.py", 8), ("", 64)])  # fmt: skip
def test_no_step_is_proposed_that_a_trainer_refuses(arch, least) -> None:
    trainer = trainer_named(arch) if arch else ANY_TRAINER
    assert trainer.step == least
    sizes = [(700 + 13 * i, 900) for i in range(100)]
    proposed = {}
    for steps in (64, 32, 16, 8):
        advice = advised(KohyaBuckets(1024, 256, 2048, steps), sizes, programs=trainer)
        proposed[steps] = int(advice["bucket_reso_steps"].proposed) if "bucket_reso_steps" in advice else steps
    refused = {steps for steps in proposed if steps % least}
    assert all(value % least == 0 for steps, value in proposed.items() if arch or steps not in refused)
    assert proposed[64] == (32 if least < 64 else 64)
    assert {steps for steps in refused if proposed[steps] != steps} == (refused if arch else set())


def test_advice_that_comes_to_the_same_is_given_once() -> None:
    sizes = [(1000, 2400)] * 30 + [(1024, 1024)] * 30
    both = advised(KohyaBuckets(1024, 704, 1024), sizes)
    afters = [r.after for r in both.values()]
    assert all(afters.count(after) == 1 for after in afters)
    alone = advised(KohyaBuckets(1024, 576, 1024), sizes)
    assert alone["max_bucket_reso"].proposed == "2048"
    assert "min_bucket_reso and max_bucket_reso" not in alone


def test_settings_are_not_bent_for_a_few_odd_files() -> None:
    ordinary = [(832, 1216)] * 80 + [(1216, 832)] * 20
    odd = [(800, 9000)] * 9 + [(32, 32)] * 8
    for rule in (KohyaBuckets(1024), KohyaBuckets(512)):
        alone, beside = advised(rule, ordinary, batch_size=4), advised(rule, ordinary + odd, batch_size=4)
        settings = {name: r for name, r in beside.items() if name != "files"}
        assert {name: (r.proposed, r.before, r.after) for name, r in settings.items()} == {
            name: (r.proposed, r.before, r.after) for name, r in alone.items()
        }
        assert all(r.why.endswith("; measured without the 17 files above") for r in settings.values())
    first = [r.setting for r in recommend(analyze(Subject("set", table(ordinary + odd), KohyaBuckets(1024), 4)))]
    assert first == sorted(first, key=lambda name: name != "files")
    assert first.count("files") == 2


def test_what_files_cost_is_what_the_others_come_to() -> None:
    ordinary, odd = [(832, 1216)] * 20, [(800, 9000)] * 3
    a = analyze(Subject("set", table(ordinary + odd), KohyaBuckets(1024), 4))
    advice = recommend(a)[0]
    assert (advice.current[:8], advice.proposed) == ("3 images", "split or leave out")
    assert advice.after == analyze(Subject("set", table(ordinary), KohyaBuckets(1024), 4)).summary
    assert "samples per epoch 23 → 20" in advice.cost
    assert "worst crop loss" in advice.gain
