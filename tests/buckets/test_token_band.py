"""`token_band`: all sizes of about as many tokens as the resolution."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import kohya_bucket
from kohya_bucket import KohyaBuckets, rule_from_name
from kohya_bucket.buckets.rules.token_band import TokenBandBuckets, token_band_sizes
from kohya_bucket.errors import BucketSettingsError


@pytest.mark.parametrize(("tolerance", "steps"), [(0.0, 64), (0.05, 16), (0.01, 32), (0.2, 8)])
def test_all_sizes_in_the_band_and_no_other(tolerance: float, steps: int) -> None:
    area = 512 * 384
    every = [
        (w, h)
        for w in range(steps, 1025, steps)
        for h in range(steps, 1025, steps)
        if min(w, h) >= 128 and abs(w * h - area) <= tolerance * area
    ]
    made = token_band_sizes(area, tolerance, 128, 1024, steps)
    assert sorted(made) == sorted(every)
    assert [abs(w * h - area) for w, h in made] == sorted(abs(w * h - area) for w, h in made)


def test_less_is_cropped_and_costs_are_nearly_equal() -> None:
    rng = np.random.default_rng(0)
    aspect = np.exp(rng.normal(0, 0.4, 2000))
    images = np.stack([1500 * np.sqrt(aspect), 1500 / np.sqrt(aspect)], axis=1).astype(np.int32)
    band, kohya = TokenBandBuckets(1024).place(images), KohyaBuckets.for_arch("flux").place(images)
    assert band.crop_loss.mean() < kohya.crop_loss.mean() / 4
    tokens = (band.bucket_sizes.astype(np.int64) // 16).prod(axis=1)
    assert abs(tokens / 4096 - 1).max() <= 0.05


def test_of_one_aspect_the_size_nearest_to_the_resolution_is_taken() -> None:
    rule = TokenBandBuckets(1024, tolerance=0.2)
    assert {(b.width, b.height) for b in rule.bucket_set} >= {(1024, 1024), (992, 992), (1040, 1040)}
    assert rule.assign(3000, 3000).as_tuple() == (1024, 1024)


def test_by_name_with_its_option() -> None:
    made = rule_from_name("token_band", max_reso=512, max_size=1024, reso_steps=16, token_tolerance=0.02)
    assert made.bucket_set.sizes.tolist() == TokenBandBuckets(512, 0.02).bucket_set.sizes.tolist()
    with pytest.raises(BucketSettingsError, match="only the rule token_band has"):
        rule_from_name("novelai", max_reso=512, token_tolerance=0.02)
    with pytest.raises(BucketSettingsError, match="raise token_tolerance, or lower the step"):
        TokenBandBuckets((500, 300), 0.0, reso_steps=64)
    with pytest.raises(BucketSettingsError, match="token_tolerance is 2"):
        TokenBandBuckets(512, 2)


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js to run the explorer's script")
def test_the_explorer_makes_the_same_sizes() -> None:
    page = Path(kohya_bucket.__file__).parent / "reports/templates/explorer/rules.js"
    script = page.read_text(encoding="utf-8")
    script = script[script.index("function tokenBandSizes") : script.index("/* Positive doubles")]
    cases = [
        (area, tolerance, steps * 4, steps * longest, steps)
        for area in (512 * 512, 832 * 1216, 300 * 700)
        for tolerance in (0, 0.01, 0.2)
        for steps, longest in ((8, 256), (16, 90), (64, 32))
    ]
    script += f"; console.log(JSON.stringify({json.dumps(cases)}.map((c) => tokenBandSizes(...c))))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[list(size) for size in token_band_sizes(*case)] for case in cases]
