"""One rank of a group that shares a data set; started from test_shared.py."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kohya_bucket.datasets.latents import BucketedLatentDataset
from kohya_bucket.datasets.shared import shared_on_node
from kohya_bucket.errors import KohyaBucketError

ROWS = 200_000


def made(folder: Path) -> dict[str, Any]:
    with (folder / "made").open("a", encoding="utf-8") as file:
        file.write("once\n")
    return {"numbers": np.arange(ROWS), "empty": np.zeros(0), "store": BucketedLatentDataset(folder / "store")}


def private_pages(array: np.ndarray) -> int:
    """Kilobytes of the mapping of an array that this process has for itself (Linux)."""
    at, inside, found = array.__array_interface__["data"][0], False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= at < end
        elif inside and first == "Private_Dirty:":
            found += int(line.split()[1])
    return found


def share(folder: Path, rank: int) -> None:
    shared = shared_on_node(lambda: made(folder), folder / "temporary")
    numbers, data = shared["numbers"], shared["store"]
    assert (numbers == np.arange(ROWS)).all()
    assert len(shared["empty"]) == 0
    dist.barrier()  # pages that one rank alone has read count as its own
    before = private_pages(numbers) if Path("/proc/self/smaps").exists() else 0
    assert before < numbers.nbytes / 1024 / 4
    numbers[rank] = -1  # in this rank alone
    dist.barrier()
    assert np.flatnonzero(numbers < 0).tolist() == [rank]
    # as it is read in training, and as worker processes are given it
    alone = BucketedLatentDataset(folder / "store")
    for items in (data, pickle.loads(pickle.dumps(data))):
        assert items.bucket_indices.tolist() == alone.bucket_indices.tolist()
        for i in range(len(alone)):
            assert items[i]["path"] == alone[i]["path"]
            bits = [held[i]["latents"].view(torch.int16) for held in (items, alone)]  # random ones hold NaNs
            assert bits[0].equal(bits[1])
    dist.barrier()
    assert list((folder / "temporary").iterdir()) == []


def fail(folder: Path, rank: int) -> None:
    def broken() -> None:
        raise KohyaBucketError("no images there")

    try:
        shared_on_node(broken, folder / "temporary")
    except KohyaBucketError as error:
        (folder / f"said{rank}").write_text(str(error), encoding="utf-8")
    try:
        shared_on_node(lambda: np.zeros(9), folder / "nowhere")
    except KohyaBucketError as error:
        (folder / f"nowhere{rank}").write_text(str(error), encoding="utf-8")


class Unreadable:
    """What every rank but the first cannot read."""

    def __reduce__(self) -> Any:
        return (_read, ())


def _read() -> str:
    if dist.get_rank():
        raise ValueError("cannot be read here")
    return "read"


def unreadable(folder: Path, rank: int) -> None:
    said: Any
    try:
        said = shared_on_node(lambda: Unreadable(), folder / "temporary")
    except ValueError as error:
        said = str(error)
    (folder / f"said{rank}").write_text(str(said), encoding="utf-8")
    dist.barrier()
    assert list((folder / "temporary").iterdir()) == []
    assert len(dist.distributed_c10d._world.pg_map) == 1  # that of the run


def rank_of(rank: int, ranks: int, folder: Path, part: str) -> None:
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    {"share": share, "fail": fail, "unreadable": unreadable}[part](folder, rank)
    dist.barrier()
    dist.destroy_process_group()
