"""transformers' Trainer, Lightning and Fabric themselves: epochs, and one that is gone on with in the middle.

No image is missed and none repeated, on one process or two, with a prepared loader. A plain one, of which transformers'
Trainer names no epoch, is refused: 4.54 names none, 5.24 those that are gone on with in the middle.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_program import BATCH, EPOCHS, IDS, STOP

from kohya_bucket.planning import plan_epoch

pytestmark = [pytest.mark.slow, pytest.mark.further]
PROGRAM = Path(__file__).with_name("trainer_program.py")


def run(way: str, ranks: int, workers: int, folder: Path, part: str, stop: int = STOP) -> list[list[list]]:
    """[epoch, images] of each batch, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "STOP": f"{stop}"}
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, *map(str, (rank, ranks, port, way, folder, workers, part))], env=environment
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(timeout=500) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    logs = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
    read = [[json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] for log in logs]
    for log in logs:
        log.unlink()
    return read


@pytest.mark.parametrize(
    ("way", "ranks", "workers", "stop"),
    [
        ("trainer", 2, 0, STOP), ("trainer, plain loader", 1, 0, 0), ("lightning", 1, 2, STOP),
        *(pytest.param(*others, marks=pytest.mark.weekly) for others in (
            ("trainer", 1, 2, STOP), ("trainer", 1, 0, 0), ("trainer", 2, 2, 0), ("trainer, plain loader", 2, 1, 0),
            ("trainer, plain loader", 1, 0, STOP), ("trainer, plain loader", 2, 1, STOP),
            ("lightning", 2, 0, STOP), ("fabric", 1, 0, STOP), ("fabric", 2, 1, STOP),
        )),
    ],
)  # fmt: skip
def test_each_epoch_is_the_planned_one(way: str, ranks: int, workers: int, stop: int, tmp_path: Path) -> None:
    for name in ("transformers",) if way.startswith("trainer") else ("lightning",):
        pytest.importorskip(name)
    plans = [plan_epoch(IDS, BATCH, world_size=ranks, seed=7, epoch=epoch) for epoch in range(EPOCHS)]
    expected = [[batch for plan in plans for batch in plan.rank_batches(rank)] for rank in range(ranks)]
    whole = run(way, ranks, workers, tmp_path, "whole", stop)
    assert [[images for _, images in log] for log in whole] == expected
    trained = plans[0].steps + stop
    resumed = run(way, ranks, workers, tmp_path, "resume", stop)
    if way == "trainer, plain loader" and (not stop or resumed[0][0][0] == "refused"):
        assert [[(what, "prepare_loader" in why) for what, why in log] for log in resumed] == [
            [("refused", True)]
        ] * ranks
        return
    assert [[images for _, images in log] for log in resumed] == [batches[trained:] for batches in expected]
