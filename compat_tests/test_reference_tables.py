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


def test_every_assignment(settings, reference_dir, capsys):
    with gzip.open(reference_dir / "kohya_assignments.csv.gz", "rt", encoding="utf-8", newline="") as table:
        rows = list(csv.DictReader(table))
    groups = {}
    for row in rows:
        groups.setdefault((row["config"], row["mode"]), []).append(row)
    without_bucket = 0
    for (config, mode), group in groups.items():
        placement = rule_of(settings[config], mode).place([(int(r["width"]), int(r["height"])) for r in group])
        for i, row in enumerate(group):
            where = f"{config} {mode} {row['width']}x{row['height']}"
            if not row["bucket_width"] or not int(row["bucket_width"]) or not int(row["bucket_height"]):
                assert placement.reason(i) == Reason.TOO_SMALL, where
                without_bucket += 1
                continue
            assert placement.bucket_sizes[i].tolist() == [int(row["bucket_width"]), int(row["bucket_height"])], where
            assert placement.resized_sizes[i].tolist() == [int(row["resized_width"]), int(row["resized_height"])], where
            assert repr(float(placement.aspect_errors[i])) == row["ar_error"], where
    assert rows
    assert np.sum([len(g) for g in groups.values()]) == len(rows)
    with capsys.disabled():
        print(f"\n{len(rows)} assignments equal, {without_bucket} of them without a bucket")
