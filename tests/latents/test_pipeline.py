"""Reading ahead, keeping behind, and how a caching ends, whatever is cached."""

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket.latents import LatentStore, precompute_latents
from kohya_bucket.latents.encode import pipeline, worker
from kohya_bucket.latents.encode.pipeline import Caching, Reader
from tests.latents.stub_encoders import PosteriorStub, dataset_of


class Disk:
    """Items 0, 1, …, of which each is ready after a random time; those of `faults` fail so often before."""

    def __init__(self, rng: random.Random, faults: dict[int, int]) -> None:
        self.rng, self.left, self.reads = rng, dict(faults), Counter[int]()

    def read(self, item: int) -> str:
        time.sleep(self.rng.random() / 500)
        self.reads[item] += 1
        if self.left.get(item):
            self.left[item] -= 1
            raise OSError(item)
        return f"read {item}"


@pytest.mark.parametrize("seed", range(8))
def test_batches_are_the_same_in_whatever_order_items_become_ready(seed: int) -> None:
    rng = random.Random(seed)
    items, most, further = list(range(rng.randrange(40))), rng.randrange(1, 6), rng.randrange(1, 9)
    shapes = {item: rng.randrange(3) if rng.random() < 0.3 else 0 for item in items}
    gone = {item for item in items if rng.random() < 0.1}
    disk, failed, asked = Disk(rng, dict.fromkeys(gone, 1)), list[int](), list[int]()

    def failing(item: int, error: Exception) -> bool:
        assert str(error) == str(item)
        failed.append(item)
        return False

    def source() -> object:
        for item in items:
            asked.append(item)
            yield item

    reader = Reader[int, str](disk.read, shapes.__getitem__, lambda _: most, lambda _: 1, failing, further)
    batches = []
    with ThreadPoolExecutor(rng.randrange(1, 5)) as pool:
        for batch, reads in reader.batches(source(), pool):
            batches.append(batch)
            assert reads == [f"read {item}" for item in batch]
            assert len(asked) - sum(map(len, batches)) - len(failed) <= most + further
    runs = [[item for item in run if item not in gone] for _, run in groupby(items, shapes.__getitem__)]
    assert [item for batch in batches for item in batch] == [item for run in runs for item in run]
    assert all(len(batch) <= most and len({shapes[item] for item in batch}) == 1 for batch in batches)
    assert failed == sorted(gone)
    assert set(disk.reads.values()) <= {1}


@pytest.mark.parametrize("seed", range(4))
def test_what_cannot_be_read_at_first_comes_after_all_others(seed: int) -> None:
    rng = random.Random(seed)
    late = {item for item in range(30) if rng.random() < 0.2}
    reader = Reader[int, str](
        Disk(rng, dict.fromkeys(late, 1)).read, lambda _: 0, lambda _: 3, lambda _: 1, lambda *_: True, 4
    )
    with ThreadPoolExecutor(3) as pool:
        found = [item for item, _ in reader.ahead(range(30), pool)]
    assert found[: 30 - len(late)] == [item for item in range(30) if item not in late]
    assert sorted(found) == list(range(30))


def test_as_much_is_read_ahead_as_memory_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_MOST_AHEAD", 100)
    begun = Counter[str]()

    def read(item: int) -> int:
        begun["items"] += 1
        return item

    reader = Reader[int, int](read, lambda _: 0, lambda _: 4, lambda _: 60, lambda *_: False, 50)
    with ThreadPoolExecutor(4) as pool:
        for n, (batch, _) in enumerate(reader.batches(range(40), pool), 1):
            assert batch == list(range(4 * n - 4, 4 * n))
            assert begun["items"] <= 4 * n + 2


def test_latents_are_the_same_in_whatever_order_images_become_ready(
    tmp_path: Path, images, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, decode = random.Random(0), worker.decode

    def late(*arguments, **options):
        time.sleep(rng.random() / 50)
        return decode(*arguments, **options)

    precompute_latents(dataset_of(images), PosteriorStub(), tmp_path / "at once", workers=1)
    monkeypatch.setattr(worker, "decode", late)
    precompute_latents(dataset_of(images), PosteriorStub(), tmp_path / "late", workers=4)
    one, other = LatentStore(tmp_path / "at once"), LatentStore(tmp_path / "late")
    assert len(one) == len(other) == len(images)
    for i in range(len(one)):
        assert one.entry(i) == other.entry(i)
        assert np.array_equal(one.read(i, flipped=False), other.read(i, flipped=False))


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_begun_after_an_error_of_what_keeps(seed: int) -> None:
    rng = random.Random(seed)
    kept, bad = list[int](), rng.randrange(20)

    def keep(item: int) -> None:
        time.sleep(rng.random() / 1000)
        if item == bad:
            raise ValueError(item)
        kept.append(item)

    caching = Caching("image", 20, keep=keep)

    def put_all() -> None:
        with caching.running():
            for item in range(20):
                caching.put(item, 1)

    with pytest.raises(ValueError, match=f"^{bad}$"):
        put_all()
    assert kept == list(range(bad))
    assert caching.kept == bad


def test_an_error_of_what_keeps_is_raised_until_the_run_ends() -> None:
    """Who encodes may take it for its own, and go on."""

    def keep(_: object) -> None:
        raise MemoryError("no room to write")

    caching = Caching("image", 40, keep=keep)

    def put_all() -> None:
        with caching.running():
            for _ in range(10):
                with contextlib.suppress(MemoryError):
                    caching.put(None, 4)

    with pytest.raises(MemoryError, match="no room to write"):
        put_all()
    assert caching.kept == 0


def test_the_time_that_is_left_is_said_once_where_a_bar_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for is_terminal, said in ((True, 1), (False, 4)):
        now[0] = 0.0
        lines.clear()
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        caching = Caching("image", 1000, keep=lambda _: None, say=lines.append)
        with caching.running():
            for _ in range(50):
                now[0] += 4.0
                caching.put(None, 2, 2_000_000)
        assert len(lines) == said
        assert lines[0] == "6 of 1,000 images (6 megapixels) encoded; the others take about 33 min"


CHILD = """
import hashlib, sys, threading, time
from kohya_bucket.latents.encode import pipeline
pipeline._PATIENCE = {patience}
caching = pipeline.Caching("image", 3, 7, keep=lambda seconds: time.sleep(seconds))
with caching.running():
    caching.put(0, 1)
    caching.finish()
    caching.put({seconds}, 1)
    print("ready", flush=True)
    {then}
"""
IN_A_LIBRARY = 'hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)'
IN_PYTHON = "threading.Event().wait()"
KEPT = "of 10 images kept; the same command goes on"


@pytest.mark.slow
@pytest.mark.posix("another process is sent SIGINT")
@pytest.mark.parametrize(
    ("then", "seconds", "patience", "interrupts", "says"),
    [
        (IN_PYTHON, 0, 60, 1, f"KeyboardInterrupt: 9 {KEPT}"),
        (IN_A_LIBRARY, 0, 0.2, 1, f"kohya_bucket: 9 {KEPT}"),
        (IN_PYTHON, 1000, 0.2, 1, f"kohya_bucket: 8 {KEPT}"),
        (IN_A_LIBRARY, 1000, 1000, 2, ""),
    ],
)
def test_an_interrupt_ends_the_process_wherever_it_is(
    then: str, seconds: int, patience: float, interrupts: int, says: str
) -> None:
    """And not when the library or the disk is done; a second one does not even wait for a line."""
    code = CHILD.format(then=then, seconds=seconds, patience=patience)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for _ in range(interrupts):
            time.sleep(0.3)
            child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
    assert child.returncode in (130, -signal.SIGINT)
    assert said.strip().splitlines()[-1:] == ([says] if says else [])


BUFFERED = """
import threading, time
from kohya_bucket.latents.encode import pipeline
pipeline._PATIENCE, made = {patience}, []
first = threading.Event()
def keep(item):
    first.set()
    time.sleep(0.6)
    made.append(item)
caching = pipeline.Caching("image", 3, 7, keep=keep, flush=lambda: print("on disk", made, flush=True))
with caching.running():
    for item in range(3):
        caching.put(item, 1)
    first.wait()
    print("ready", flush=True)
    {then}
"""


@pytest.mark.slow
@pytest.mark.posix("another process is sent SIGINT")
@pytest.mark.parametrize("then", ["pass", IN_PYTHON])
@pytest.mark.parametrize("patience", [0.1, 60])
def test_on_an_interrupt_all_that_was_put_is_put_on_disk(then: str, patience: float) -> None:
    """Also where it comes while the end is waited for, and where what is kept waits in memory to be written."""
    pipe, code = subprocess.PIPE, BUFFERED.format(then=then, patience=patience)
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        out, said = child.communicate(timeout=60)
    assert child.returncode in (130, -signal.SIGINT)
    assert out.splitlines()[-1] == "on disk [0, 1, 2]"
    assert said.strip().splitlines()[-1].endswith(f"10 {KEPT}")


def test_interrupts_are_python_s_own_again_behind_a_caching() -> None:
    before = signal.set_wakeup_fd(-1)
    assert before == -1
    with Caching("image", 1, keep=lambda _: None).running():
        inside = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(inside)
        assert inside != -1
        ended = threading.Thread(target=lambda: Caching("image", 1, keep=print).running().__enter__())
        ended.start()
        ended.join()
        assert signal.set_wakeup_fd(inside) == inside
    assert signal.set_wakeup_fd(-1) == -1
