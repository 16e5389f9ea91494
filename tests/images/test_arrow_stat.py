"""What pyarrow says of many files is what `os.stat` says of each."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket.images.scan.arrow_stat import can_stat_together, stat_together
from kohya_bucket.images.scan.pool import Job


def write(folder: Path, names: list[str]) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    return [str(folder / name) for name in names]


@pytest.fixture
def arrow() -> None:
    pytest.importorskip("pyarrow.fs")
    if not can_stat_together():
        pytest.skip("pyarrow's times have not been compared with os.stat on this system")


@pytest.mark.usefixtures("arrow")
def test_arrow_tells_times_and_lengths_as_stat_does(tmp_path: Path) -> None:
    paths = write(tmp_path, [f"{i}.txt" for i in range(200)])
    times = [-5_000_000_001, 0, 1, 1_700_000_000_123_456_789, 4_102_444_800_000_000_001]
    for i, path in enumerate(paths):
        os.utime(path, ns=(0, times[i % len(times)] + i))
    (tmp_path / "link").symlink_to(paths[3])
    paths.append(str(tmp_path / "link"))
    told = stat_together(paths)
    assert told is not None
    assert told.tolist() == [number for s in map(os.stat, paths) for number in (s.st_mtime_ns, s.st_size)]


@pytest.mark.usefixtures("arrow")
@pytest.mark.parametrize("odd", ["missing.txt", "", ".", "s3://bucket/x.png", "nul\0byte", "surrogate\udc80"])
def test_what_arrow_does_not_tell_is_asked_one_by_one(tmp_path: Path, odd: str) -> None:
    paths = write(tmp_path, [f"{i}.txt" for i in range(100)])
    paths[40] = odd if "://" in odd or not odd else str(tmp_path / odd)
    assert stat_together(paths) is None
    if "://" in odd:
        return
    job = Job("stat", paths)
    job.run()
    assert [i for i, _ in job.failures] == ([] if odd == "." else [40])
    assert (np.delete(job.rows["bytes"], 40) > 0).all()


@pytest.mark.usefixtures("arrow")
def test_threads_share_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kohya_bucket.images.scan.pool._CHUNK", 100)
    monkeypatch.setattr("kohya_bucket.images.scan.pool.os.cpu_count", lambda: 4)
    # A machine so busy that the first look takes it for a slow disk would choose otherwise.
    monkeypatch.setattr("kohya_bucket.images.scan.pool._COMPUTING", 0.0)
    paths = write(tmp_path, [f"{i}.txt" for i in range(2000)])
    paths[1500] = str(tmp_path / "gone")
    job = Job("stat", paths)
    job.run()
    assert job.engines == ["calls"]
    assert job.failures == [(1500, "no such file")]
    assert job.rows["bytes"].tolist() == [0 if i == 1500 else len(f"{i}.txt") for i in range(2000)]
