"""The scan over threads and processes: same rows as alone, and what is finished survives an interrupt."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from image_corpus import encode, picture
from PIL import Image

from kohya_bucket.images import ScanInterrupted, read_sizes, scan_worker
from kohya_bucket.images import scan as scan_module
from kohya_bucket.images.scan import Job
from kohya_bucket.images.scan_worker import Helper


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("many")
    kinds = [encode(picture(size=(10 + k, 20 + k)), kind) for k, kind in enumerate(("PNG", "JPEG", "WEBP", "TIFF"))]
    paths = []
    for i in range(300):
        path = folder / f"{i}.png"
        path.write_bytes(kinds[i % 4] if i % 10 else b"broken")
        paths.append(str(path))
    return paths * 8


@pytest.mark.long
@pytest.mark.parametrize("engine", ["threads", "processes", "auto"])
def test_every_engine_gives_the_same_rows(many: list[str], engine: str) -> None:
    alone = read_sizes(many, engine="alone")
    other = read_sizes(many, engine=engine, workers=3)
    assert (alone.sizes == other.sizes).all()
    assert (alone.formats == other.formats).all()
    assert alone.failures == other.failures
    assert other.read.all()
    assert len(alone.failures) == 240


@pytest.mark.long
def test_slow_storage_is_read_on_threads(many: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def slow(*args: object, **options: object) -> int:
        time.sleep(0.01)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", slow)
    probe, chosen = Job._probe, []
    monkeypatch.setattr(Job, "_probe", lambda job: chosen.append(probe(job)) or chosen[-1])
    assert read_sizes(many).read.all()
    assert set(chosen) == {"threads"}


@pytest.mark.long
@pytest.mark.parametrize("engine", ["alone", "threads", "processes"])
def test_ctrl_c_keeps_what_is_finished(many: list[str], monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    complete = read_sizes(many)
    monkeypatch.setattr(scan_module, "_CHUNK", 50)
    monkeypatch.setattr(scan_module, "_REPORT_EVERY_S", 0.0)

    def interrupt(done: int, total: int) -> None:
        if done >= 100:
            raise KeyboardInterrupt

    with pytest.raises(ScanInterrupted, match=f"of {len(many)} files") as caught:
        read_sizes(many, engine=engine, workers=2, progress=interrupt)
    scan = caught.value.scan
    assert scan.read.any()
    assert (scan.sizes[scan.read] == complete.sizes[scan.read]).all()
    assert not scan.sizes[~scan.read].any()


def test_progress_ends_at_the_total(many: list[str]) -> None:
    seen: list[tuple[int, int]] = []
    read_sizes(many, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(many), len(many))
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


def test_a_dead_helper_costs_no_rows(many: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "_CHUNK", 50)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    scan = read_sizes(many, engine="processes", workers=2)
    assert scan.read.all()


@pytest.mark.long
def test_a_script_without_a_main_guard_may_scan_on_processes(many: list[str], tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import sys\nfrom kohya_bucket.images import read_sizes\n"
        "scan = read_sizes(sys.argv[1:] * 100, engine='processes', workers=2)\nprint('once', len(scan))\n",
        encoding="utf-8",
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script), *many[:40]], capture_output=True, text=True, timeout=600, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("once 4000\n", 0), done.stderr


def test_no_files() -> None:
    scan = read_sizes([])
    assert scan.sizes.shape == (0, 2)
    assert scan.sizes.dtype == np.int32
    assert scan.failures == []


def test_an_interrupt_while_threads_are_started_is_an_interrupt(tmp_path: Path, monkeypatch) -> None:
    """A thread that was never started cannot be joined: the scan, and what it had read, was lost in that error."""
    Image.new("RGB", (8, 9)).save(tmp_path / "a.png")

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(ScanInterrupted):
        read_sizes([tmp_path / "a.png"] * 100, engine="threads")


def test_what_comes_after_an_interrupt_is_not_taken_for_read(many: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that hangs in a slow disk outlives the scan."""
    real, answered, first = os.open, threading.Event(), threading.Lock()

    def slow(*args: object) -> int:
        if not first.acquire(blocking=False):
            assert answered.wait(30)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", slow)
    monkeypatch.setattr(scan_module, "_REPORT_EVERY_S", 0.0)

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(ScanInterrupted) as caught:
        read_sizes(many[1:9], engine="threads", workers=2, progress=interrupt)
    scan = caught.value.scan
    answered.set()
    assert scan.read.sum() == 1
    assert scan.read.tolist() == (scan.sizes[:, 0] > 0).tolist()


def test_no_helper_process_outlives_an_interrupt(many: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def remembered(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remembered)
    monkeypatch.setattr(scan_module, "_REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(scan_module.os, "cpu_count", lambda: 3)

    def interrupt(done: int, total: int) -> None:
        if started:
            raise KeyboardInterrupt

    with pytest.raises(ScanInterrupted):
        read_sizes(many * 20, engine="processes", workers=3, progress=interrupt)
    for process in started:
        process.wait(30)


def test_a_helper_that_waits_for_a_dead_disk_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper()
    process = helper._process
    monkeypatch.setattr(scan_worker, "_GRACE_S", 0.1)
    monkeypatch.setattr(process, "kill", lambda: None)  # as it is for one that is in such a call
    helper.close()
    assert process.poll() is None
    monkeypatch.undo()
    helper.close()
    assert process.poll() is not None
