"""What pyarrow says of many files is what `os.stat` says of each."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket.images.scan.arrow_stat import stat_together
from kohya_bucket.images.scan.pool import Job


def write(folder: Path, names: list[str]) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    return [str(folder / name) for name in names]


@pytest.fixture
def arrow() -> None:
    pytest.importorskip("pyarrow.fs")
    if os.name != "posix":
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
