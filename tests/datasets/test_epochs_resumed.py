"""Epochs through accelerate, saved and resumed in a fresh program: every image exactly as often as planned.

Real processes of one gloo group. Further versions of accelerate are tested where KOHYA_BUCKET_ACCELERATE names folders
that hold them (`pip install --no-deps --target FOLDER accelerate==0.30.0`).
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from epoch_program import BATCH, EPOCHS, IDS, SAVED, STOP

from kohya_bucket.planning import EpochPlan, plan_epoch

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("epoch_program.py")
INSTALLED = ""
OTHERS = [*filter(None, os.environ.get("KOHYA_BUCKET_ACCELERATE", "").split(os.pathsep))]


def run(accelerate: str, ranks: int, part: str, folder: Path) -> list[list[dict]]:
    """All ranks in processes of their own; what each of them wrote."""
    path = os.pathsep.join(filter(None, [accelerate, str(ROOT), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    store = folder / f"meeting-{part}"
    processes = [
        subprocess.Popen([sys.executable, PROGRAM, str(rank), str(ranks), store, part, folder], env=environment)
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks
    logs = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
    read = [[json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] for log in logs]
    for log in logs:
        log.unlink()
    return read


def trained(log: list[dict], **wanted: object) -> list[list[int]]:
    return [row["images"] for row in log if "images" in row and all(row[key] == wanted[key] for key in wanted)]


def planned(epoch: int, ranks: int) -> EpochPlan:
    return plan_epoch(IDS, BATCH, world_size=ranks, epoch=epoch, seed=7)


@pytest.mark.weekly
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("accelerate", [INSTALLED, *OTHERS], ids=lambda p: Path(p).name or "installed")
def test_no_image_is_missed_and_none_repeated(tmp_path: Path, accelerate: str, ranks: int) -> None:
    before = run(accelerate, ranks, "save", tmp_path)
    after = run(accelerate, ranks, "resume", tmp_path)
    ways = sorted({row["way"] for row in before[0] if "images" in row})
    assert len(ways) >= 3
    for way in ways:
        for epoch in range(EPOCHS):
            plan = planned(epoch, ranks)
            assert [trained(log, way=way, epoch=epoch) for log in before] == rows_of(plan, ranks)
        for epoch in SAVED:
            plan, next_one = planned(epoch, ranks), planned(epoch + 1, ranks)
            assert starts(after, way, f"{epoch}") == [[epoch, STOP]] * ranks
            assert [trained(log, way=way, resumed=f"{epoch}", epoch=epoch) for log in after] == rows_of(
                plan, ranks, STOP
            )
            assert [trained(log, way=way, resumed=f"{epoch}", epoch=epoch + 1) for log in after] == rows_of(
                next_one, ranks
            )
            assert missed_and_repeated(before, after, way, epoch, plan) == (0, 0)
        for where in ("last", "after"):  # the second epoch was whole
            assert starts(after, way, where) == [[2, 0]] * ranks
            for epoch in (2, 3):
                assert [trained(log, way=way, resumed=where, epoch=epoch) for log in after] == rows_of(
                    planned(epoch, ranks), ranks
                )
    check_refusals(before)


def rows_of(plan: EpochPlan, ranks: int, begin: int = 0) -> list[list[list[int]]]:
    return [list(plan.rank_batches(rank, begin)) for rank in range(ranks)]


def starts(logs: list[list[dict]], way: str, where: str) -> list[list[int]]:
    return [row["at"] for log in logs for row in log if "at" in row and (row["way"], row["resumed"]) == (way, where)]


def missed_and_repeated(
    before: list[list[dict]], after: list[list[dict]], way: str, epoch: int, plan: EpochPlan
) -> tuple[int, int]:
    """Of one epoch, in both programs; what the ledger names is as planned."""
    counts: Counter[int] = Counter()
    for log in before:
        counts.update(image for batch in trained(log, way=way, epoch=epoch)[:STOP] for image in batch)
    for log in after:
        counts.update(i for batch in trained(log, way=way, resumed=f"{epoch}", epoch=epoch) for i in batch)
    counts.subtract(plan.ledger().image.tolist())
    return sum(counts[i] < 1 for i in range(len(IDS))), sum(counts[i] > 1 for i in range(len(IDS)))


def check_refusals(logs: list[list[dict]]) -> None:
    """accelerate's own `prepare` is refused in every setting, ours where batches would be dealt out again."""
    rows = [(rank, row) for rank, log in enumerate(logs) for row in log if "refused" in row]
    assert len(rows) in (len(logs) * 36, len(logs) * 48)  # fewer where accelerate knows no stateful loader
    for rank, row in rows:
        name, dispatch, split, _ = row["way"]
        if name != "prepare_loader" and dispatch and rank:
            continue
        if name != "prepare_loader":
            assert "prepare_loader" in row["refused"]
        elif dispatch or split:
            wrong = "split_batches" if split else "dispatch_batches"
            assert f"accelerate is set to {wrong}=True" in row["refused"]
            assert f"leave {wrong} out" in row["refused"]
        else:
            assert row["refused"] == ""
