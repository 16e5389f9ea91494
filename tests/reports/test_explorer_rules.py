"""The explorer's rules and placement in a real browser: equal to Python, and to what sd-scripts itself computed."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from browser import chromium

pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")
from explorer_support import open_explorer

from kohya_bucket import FixedBuckets, KohyaBuckets, load_preset
from kohya_bucket.buckets import list_presets
from kohya_bucket.errors import BucketSettingsError
from kohya_bucket.reports.rule_data import browser_rule
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, rule_for
from kohya_bucket.trainers.door.options import AdapterOptions

pytestmark = pytest.mark.slow
REFERENCE = Path(__file__).parents[2] / "compat_tests" / "reference"
BASE = {"batch": 1, "noUpscale": False, "buckets": "kohya", "switching": None, "fit": "kohya", "maxCrop": None}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as session:
        open_explorer(session, tmp_path_factory.mktemp("page"))
        yield session


def rule_in_browser(browser, **settings):
    text = browser.execute_script(
        "return JSON.stringify(ruleOf(arguments[0], explorer.settings.sets))", {**BASE, **settings}
    )
    return json.loads(text)


def test_every_row_of_the_reference(browser) -> None:
    settings = {s["id"]: s for s in json.loads((REFERENCE / "kohya_bucket_sets.json").read_text(encoding="utf-8"))}
    with gzip.open(REFERENCE / "kohya_assignments.csv.gz", "rt", encoding="utf-8", newline="") as table:
        rows = list(csv.DictReader(table))
    groups = {}
    for row in rows:
        groups.setdefault((row["config"], row["mode"]), []).append(row)
    compared = 0
    for (config, mode), group in groups.items():
        s = settings[config]
        given = {
            **BASE, "resolution": s["max_reso"], "min": s["min_size"], "max": s["max_size"], "steps": s["reso_steps"],
            "noUpscale": mode == "no_upscale",
        }  # fmt: skip
        answer = json.loads(
            browser.execute_script(
                "const {rule, error} = ruleOf(arguments[0], {}); if (error) throw new Error(error);"
                "return JSON.stringify([rule.sizes, arguments[1].map(([w, h]) => { const p = place(rule, w, h);"
                "return p.bucket && [...p.bucket, ...p.resized, p.aspectError]; })])",
                given, [[int(r["width"]), int(r["height"])] for r in group],
            )
        )  # fmt: skip
        if mode == "upscale":
            assert answer[0] == s["resolutions"], config
        for row, found in zip(group, answer[1], strict=True):
            if not row["bucket_width"] or not int(row["bucket_width"]) or not int(row["bucket_height"]):
                assert found is None, row
            else:
                wanted = [int(row[k]) for k in ("bucket_width", "bucket_height", "resized_width", "resized_height")]
                assert found[:4] == wanted, row
                assert float(found[4]) == float(row["ar_error"]), row
            compared += 1
    assert compared == len(rows) == 30_000


@pytest.mark.parametrize("switching", ["midpoint", "geometric", "area"])
def test_rules_are_those_of_python(browser, switching) -> None:
    """Sets, orders and switching points to the last bit."""
    for side, low, high, steps in [
        ((512, 512), 256, 1024, 64),
        ((832, 1216), 256, 1536, 8),
        ((1024, 1024), 256, 2048, 32),
    ]:
        rule = KohyaBuckets(side, low, high, steps, switching=switching, max_crop=0.1)
        found = rule_in_browser(
            browser, resolution=side, min=low, max=high, steps=steps, switching=switching, maxCrop=0.1
        )
        assert found == {"rule": browser_rule(rule)}
    for name in list_presets():
        found = rule_in_browser(
            browser, resolution=(1024, 1024), min=256, max=2048, steps=8, buckets=name, switching=switching,
            noUpscale=True,
        )  # fmt: skip
        assert found == {"rule": browser_rule(FixedBuckets(load_preset(name), switching=switching, no_upscale=True))}


def test_settings_are_refused_where_python_refuses_them(browser) -> None:
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(150):
        side = tuple(int(x) for x in rng.choice([32, 64, 256, 512, 768, 1000, 1024, 2048], 2))
        low, high = (int(x) for x in rng.choice([1, 60, 64, 100, 256, 512, 1000, 1024, 2048], 2))
        steps, no_upscale = int(rng.choice([8, 32, 64, 100])), bool(rng.integers(2))
        fit = str(rng.choice(["kohya", "largest", "standard"])) if no_upscale else "kohya"
        found = rule_in_browser(browser, resolution=side, min=low, max=high, steps=steps, noUpscale=no_upscale, fit=fit)
        try:
            rule = rule_for(DatasetKeys(side, True, low, high, steps, no_upscale), AdapterOptions(no_upscale_fit=fit))
        except BucketSettingsError:
            assert found.get("error"), (side, low, high, steps, fit)
            refused += 1
        else:
            assert found == {"rule": browser_rule(rule)}, (side, low, high, steps, fit)
    assert 20 < refused < 145


def test_bucketing_off_is_one_bucket(browser) -> None:
    found = rule_in_browser(browser, resolution=(640, 512), min=256, max=1024, steps=64, buckets="none")
    assert found == {"rule": browser_rule(rule_for(DatasetKeys((640, 512))))}
