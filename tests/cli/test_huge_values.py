"""Values far beyond all reason, as a slip of the finger makes them: one clear error, at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kohya_bucket.buckets import KohyaBuckets
from kohya_bucket.buckets.rules.kohya import kohya_bucket_sizes
from kohya_bucket.buckets.rules.novelai import novelai_bucket_sizes
from kohya_bucket.cli import app
from kohya_bucket.errors import KohyaBucketError, PlanError
from kohya_bucket.planning import plan_epoch

HUGE = 10**23
CONFIG = """
[[datasets]]
resolution = 512
enable_bucket = true
{dataset}
[[datasets.subsets]]
image_dir = '{folder}'
[kohya_bucket]
{table}
"""


def planned(folder: Path, dataset: str = "", table: str = "", *options: str) -> str:
    config = folder.parent / "c.toml"
    config.write_text(CONFIG.format(folder=folder, dataset=dataset, table=table), encoding="utf-8")
    result = CliRunner().invoke(app, ["plan", str(config), *options])
    assert isinstance(result.exception, KohyaBucketError), result.exception
    return str(result.exception)


def test_the_adapters_settings(folder: Path) -> None:
    assert "max_pixels is 100000000000000000000000, but must be less than" in planned(
        folder, table=f"max_pixels={HUGE}"
    )
    table = f"order='runs'\nrun_length={HUGE}"
    assert "run_length is 100000000000000000000000, but must be less than" in planned(folder, table=table)
    weights = "resolutions=[512, 768]\nresolution_mode='weighted'\nresolution_weights=[inf, 1.0]"
    assert "resolution_weights is [inf, 1.0], but must be a list of numbers" in planned(folder, table=weights)
    many = f"rule='auto'\nnum_buckets={HUGE}"
    assert "num_buckets is 100000000000000000000000, but must be 65,536 or less" in planned(folder, table=many)


def test_the_datasets_settings(folder: Path) -> None:
    expected = "batch_size is 100000000000000000000000, but must be less than 2,147,483,648"
    assert planned(folder, f"batch_size={HUGE}") == expected


def test_gpus(folder: Path) -> None:
    assert "--gpus is '99999999999', but must be" in planned(folder, "", "", "--gpus", "99999999999")


@pytest.mark.parametrize("name", ["world_size", "accumulate", "run_length"])
def test_planning(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} is {HUGE}, but must be less than"):
        plan_epoch([0, 0, 1], 2, **{name: HUGE})  # type: ignore[arg-type]


def test_a_resolution() -> None:
    with pytest.raises(KohyaBucketError, match="no side can be above 1,000,000 pixels"):
        KohyaBuckets(10**11, max_size=64 * 10**10)


def test_a_limit_beyond_the_area_changes_nothing() -> None:
    assert kohya_bucket_sizes((512, 512), 64, 4096) == kohya_bucket_sizes((512, 512), 64, 64 * 10**15)
    rest = ((768, 512), 64, 256, (512, 512))
    assert novelai_bucket_sizes(*rest, dim_limit=1536) == novelai_bucket_sizes(*rest, dim_limit=10**18)
