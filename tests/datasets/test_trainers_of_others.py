"""transformers' Trainer, Lightning and Fabric themselves: epochs, and one that is gone on with in the middle.

No image is missed and none repeated, on one process or two, whether our loader is prepared or plain.
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


def run(way: str, ranks: int, workers: int, folder: Path, part: str) -> list[list[list]]:
    """[epoch, images] of each batch, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
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
    ("way", "ranks", "workers"),
    [
        ("trainer", 2, 0), ("lightning", 1, 2),
        *(pytest.param(*others, marks=pytest.mark.weekly) for others in (
            ("trainer", 1, 2), ("trainer, plain loader", 1, 0), ("trainer, plain loader", 2, 1), ("lightning", 2, 0),
            ("fabric", 1, 0), ("fabric", 2, 1),
        )),
    ],
)  # fmt: skip
def test_each_epoch_is_the_planned_one(way: str, ranks: int, workers: int, tmp_path: Path) -> None:
    for name in ("transformers",) if way.startswith("trainer") else ("lightning",):
        pytest.importorskip(name)
    plans = [plan_epoch(IDS, BATCH, world_size=ranks, seed=7, epoch=epoch) for epoch in range(EPOCHS)]
    expected = [[batch for plan in plans for batch in plan.rank_batches(rank)] for rank in range(ranks)]
    whole = run(way, ranks, workers, tmp_path, "whole")
    assert [[images for _, images in log] for log in whole] == expected
    trained = plans[0].steps + STOP
    resumed = run(way, ranks, workers, tmp_path, "resume")
    assert [[images for _, images in log] for log in resumed] == [batches[trained:] for batches in expected]
