"""Streams on real ranks: processes of one gloo group, which meet at a port or in a file."""

import json
import socket
from collections import Counter
from pathlib import Path

import pytest
from stream_ranks import N, rank_of

from tests.warm import QUICK


def started(folder: Path, ranks: int, workers: int, at_port: bool) -> dict[str, list[dict]]:
    """{case: what each rank wrote}."""
    store = (folder / "meeting").as_uri()
    if at_port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    processes = [QUICK.Process(target=rank_of, args=(rank, ranks, store, folder, workers)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
    assert [process.exitcode for process in processes] == [0] * ranks
    logs = [(folder / f"rank{r}-{workers}.jsonl").read_text(encoding="utf-8").splitlines() for r in range(ranks)]
    return {json.loads(rows[0])["case"]: [json.loads(row) for row in rows] for rows in zip(*logs, strict=True)}


@pytest.mark.parametrize(
    ("ranks", "workers", "at_port"),
    [
        (2, 0, False),
        pytest.param(2, 2, True, marks=pytest.mark.slow),
        pytest.param(3, 0, True, marks=pytest.mark.slow),
        pytest.param(3, 1, False, marks=pytest.mark.slow),
        pytest.param(5, 0, False, marks=pytest.mark.slow),
    ],
)
def test_ranks_share_a_stream_or_fail_before_the_first_batch(
    tmp_path: Path, ranks: int, workers: int, at_port: bool
) -> None:
    found = started(tmp_path, ranks, workers, at_port)
    for case in ("whole", "whole, in its order", *(["hf seeded"] if "hf seeded" in found else [])):
        rows = found[case]
        assert [row["refused"] for row in rows] == [""] * ranks
        assert len({len(row["trained"]) for row in rows}) == 1  # as many steps on each
        # of both epochs; a short batch may repeat an image of its own, so that no rank is empty
        steps = zip(*(row["trained"] for row in rows), strict=True)
        seen = Counter(image for step in steps for image in {i for batch in step for i in batch})
        assert seen == dict.fromkeys(range(N), 2)
    for row in found["alone"]:  # who says that it is alone reads alone
        assert sorted(i for batch in row["trained"] for i in batch) == sorted([*range(N)] * 2)
    for case in ("unseeded", "unseeded, in its order", "split"):
        for row in found[case]:
            assert row["trained"] == []
            assert "reads another stream than rank 0" in row["refused"]
            assert "shuffle it with the same seed on all ranks" in row["refused"]
    for row in found["seeds"]:
        assert row["trained"] == []
        assert "seed was 0, now 1" in row["refused"]
    for row in found["changes later"]:
        assert "what the images are, in their order" in row["refused"]
    if "hf split" in found:
        assert all("shuffled without a seed" in row["refused"] for row in found["hf unseeded"])
        assert all("without split_dataset_by_node" in row["refused"] for row in found["hf split"])
