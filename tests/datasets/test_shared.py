"""Ranks of a node share what one of them made."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from kohya_bucket.datasets.shared import shared_on_node
from kohya_bucket.images import TextColumn
from tests.datasets.shared_ranks import rank_of
from tests.latents.latent_helpers import fill
from tests.warm import QUICK


def start(ranks: int, folder: Path, part: str) -> list[int | None]:
    (folder / "temporary").mkdir()
    processes = [QUICK.Process(target=rank_of, args=(rank, ranks, folder, part)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in processes]


def test_one_rank_makes_it_and_all_have_it(tmp_path: Path) -> None:
    fill(tmp_path / "store", [f"{i}.png" for i in range(7)])
    assert start(3, tmp_path, "share") == [0, 0, 0]
    assert (tmp_path / "made").read_text(encoding="utf-8") == "once\n"


def test_when_it_cannot_be_made_every_rank_says_so(tmp_path: Path) -> None:
    assert start(2, tmp_path, "fail") == [0, 0]
    assert (tmp_path / "said0").read_text(encoding="utf-8") == "no images there"
    assert "rank 0 could not make what ranks share: KohyaBucketError: no images there" in (
        tmp_path / "said1"
    ).read_text(encoding="utf-8")
    for rank in range(2):
        assert "nowhere" in (tmp_path / f"nowhere{rank}").read_text(encoding="utf-8")


def test_a_rank_that_cannot_read_it_leaves_nobody_waiting(tmp_path: Path) -> None:
    assert start(2, tmp_path, "unreadable") == [0, 0]
    assert [(tmp_path / f"said{rank}").read_text(encoding="utf-8") for rank in range(2)] == [
        "read", "cannot be read here"
    ]  # fmt: skip


def test_a_single_process_has_its_own() -> None:
    made = np.zeros(3)
    assert shared_on_node(lambda: made) is made


@pytest.mark.parametrize("protocol", range(2, 6))
def test_texts_travel_by_every_protocol(protocol: int) -> None:
    texts = TextColumn.of(["a", "", "bé", "c" * 99])
    assert list(pickle.loads(pickle.dumps(texts, protocol=protocol))) == list(texts)
    if protocol == 5:
        beside: list[pickle.PickleBuffer] = []
        rest = pickle.dumps(texts, protocol=5, buffer_callback=beside.append)
        assert b"ccc" not in rest
        again = pickle.loads(rest, buffers=[memoryview(bytes(part.raw())) for part in beside])
        assert again == texts
        assert again.find(["bé", "d"]).tolist() == [2, -1]
