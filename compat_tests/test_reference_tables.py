"""Every row of the tables that sd-scripts' own code computed, compared for equality, floats included."""

import csv
import gzip
import json

import numpy as np
import pytest

from kohya_bucket import KohyaBuckets
from kohya_bucket.buckets import Reason
from kohya_bucket.buckets.rules.kohya import kohya_bucket_sizes


@pytest.fixture(scope="module")
def settings(reference_dir):
    return {s["id"]: s for s in json.loads((reference_dir / "kohya_bucket_sets.json").read_text(encoding="utf-8"))}


def rule_of(setting, mode):
    reso, low, high, steps = (setting[k] for k in ("max_reso", "min_size", "max_size", "reso_steps"))
    return KohyaBuckets(tuple(reso), low, high, steps, no_upscale=mode == "no_upscale")


def test_every_bucket_set(settings, capsys):
    for setting in settings.values():
        expected = [tuple(b) for b in setting["resolutions"]]
        assert [b.as_tuple() for b in rule_of(setting, "upscale").bucket_set] == expected
        reso, low, high, steps = (setting[k] for k in ("max_reso", "min_size", "max_size", "reso_steps"))
        assert kohya_bucket_sizes(tuple(reso), low, high, steps) == expected
    with capsys.disabled():
        print(f"\n{len(settings)} bucket sets equal")


def rows_of(path):
    with gzip.open(path, "rt", encoding="utf-8", newline="") as table:
        return list(csv.DictReader(table))


def assert_equal_row(placement, i, row):
    assert placement.bucket_sizes[i].tolist() == [int(row["bucket_width"]), int(row["bucket_height"])], row
    assert placement.resized_sizes[i].tolist() == [int(row["resized_width"]), int(row["resized_height"])], row
    assert repr(float(placement.aspect_errors[i])) == row["ar_error"], row


def test_every_assignment(settings, reference_dir, capsys):
    rows = rows_of(reference_dir / "kohya_assignments.csv.gz")
    groups = {}
    for row in rows:
        groups.setdefault((row["config"], row["mode"]), []).append(row)
    without_bucket = 0
    for (config, mode), group in groups.items():
        placement = rule_of(settings[config], mode).place([(int(r["width"]), int(r["height"])) for r in group])
        for i, row in enumerate(group):
            if not row["bucket_width"] or not int(row["bucket_width"]) or not int(row["bucket_height"]):
                assert placement.reason(i) == Reason.TOO_SMALL, row
                without_bucket += 1
                continue
            assert_equal_row(placement, i, row)
    assert rows
    assert np.sum([len(g) for g in groups.values()]) == len(rows)
    with capsys.disabled():
        print(f"\n{len(rows)} assignments equal, {without_bucket} of them without a bucket")


def test_every_assignment_of_the_fork_that_tries_the_usual_buckets_first(settings, reference_dir, capsys):
    """`no_upscale_fit = "standard"`; its sizes above the area of the resolution are sd-scripts' reduced ones here."""
    rows, beyond = rows_of(reference_dir / "usual_first_assignments.csv.gz"), 0
    for config in sorted({row["config"] for row in rows}):
        group = [row for row in rows if row["config"] == config]
        sizes = [(int(row["width"]), int(row["height"])) for row in group]
        plain = rule_of(settings[config], "no_upscale")
        standard, reduced = plain.changed(no_upscale_fit="standard").place(sizes), plain.place(sizes)
        for i, row in enumerate(group):
            area = int(row["bucket_width"] or 0) * int(row["bucket_height"] or 0)
            if area > plain.max_area:
                beyond += 1
                assert standard.bucket_sizes[i].tolist() == reduced.bucket_sizes[i].tolist(), row
                assert standard.resized_sizes[i].tolist() == reduced.resized_sizes[i].tolist(), row
            elif area:
                assert_equal_row(standard, i, row)
            else:
                assert standard.reason(i) == Reason.TOO_SMALL, row
    assert len(rows) == 5_000
    with capsys.disabled():
        print(f"\n{len(rows) - beyond} assignments equal, {beyond} of sizes above the area reduced")
