"""A group of ranks that read streams, all cases in the same processes."""

import io
import json
import os
import random
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader

from kohya_bucket import KohyaBuckets, StreamingBuckets
from kohya_bucket.errors import KohyaBucketError
from tests.warm import QUICK

N = 60
WITH_WORKERS = ("whole", "unseeded", "hf seeded")
RULE = KohyaBuckets(32, 16, 64, 16)


def rows() -> list[dict[str, Any]]:
    rng, found = np.random.RandomState(3), []
    for number in range(N):
        buffer = io.BytesIO()
        size = tuple(map(int, rng.randint(20, 70, 2)))
        Image.new("RGB", size, (number, 2 * number, number)).save(buffer, "PNG")
        found.append({"image": buffer.getvalue(), "text": str(number)})
    return found


class Shuffled:
    """Another order on each rank where the seed is None, as a shuffle without one gives; `part` is every n-th."""

    def __init__(self, seed: int | None = None, part: tuple[int, int] = (1, 0)) -> None:
        self.seed, self.part = seed, part

    def __iter__(self) -> Iterator[dict[str, Any]]:
        found = rows()
        random.Random(self.seed).shuffle(found)
        yield from found[self.part[1] :: self.part[0]]


class ChangesLater(Shuffled):
    """The same on all ranks for half of it, and then in another order on each."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        found = rows()
        late = found[N // 2 :]
        random.Random().shuffle(late)
        yield from found[: N // 2] + late


def streams(rank: int, ranks: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(name, stream, options): of plain Python, and of Hugging Face."""
    yield "whole", Shuffled(5), {}
    yield "whole, in its order", Shuffled(5), {"shuffle": False}
    yield "unseeded", Shuffled(), {}
    yield "unseeded, in its order", Shuffled(), {"shuffle": False}
    yield "split", Shuffled(5, (ranks, rank)), {}
    yield "changes later", ChangesLater(), {"buffer_size": 20}
    yield "seeds", Shuffled(5), {"seed": rank}
    yield "alone", Shuffled(5), {"num_replicas": 1, "rank": 0}
    try:
        import datasets
        from datasets.distributed import split_dataset_by_node
    except ImportError:
        return
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    table = {"image": [{"bytes": r["image"], "path": None} for r in rows()], "text": [r["text"] for r in rows()]}
    hf = datasets.Dataset.from_dict(table, features=features).to_iterable_dataset(num_shards=4)
    yield "hf seeded", hf.shuffle(seed=7, buffer_size=20), {}
    yield "hf unseeded", hf.shuffle(buffer_size=20), {}
    yield "hf split", split_dataset_by_node(hf, rank, ranks), {}


def read(folder: Path, rank: int, ranks: int, workers: int) -> None:
    with (folder / f"rank{rank}-{workers}.jsonl").open("w", encoding="utf-8") as log:
        for name, stream, options in streams(rank, ranks):
            if workers and name not in WITH_WORKERS:  # whose start takes most of the time
                continue
            trained: list[list[int]] = []
            refused = ""
            settings = {"caption_column": "text", "buffer_size": 30, **options}
            try:
                made = StreamingBuckets.from_hf(stream, RULE, 2, **settings)
                context = QUICK if workers else None
                loader = DataLoader(made, batch_size=None, num_workers=workers, multiprocessing_context=context)
                for epoch in (0, 1):
                    made.set_epoch(epoch)
                    trained += [[int(caption) for caption in batch["caption"]] for batch in loader]
            except KohyaBucketError as error:
                refused = str(error)
            log.write(json.dumps({"case": name, "trained": trained, "refused": refused}) + "\n")
            dist.barrier()


def rank_of(rank: int, ranks: int, store: str, folder: Path, workers: int) -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(ranks)})
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    read(folder, rank, ranks, workers)
    os._exit(0)


def elastic_rank(rank: int, attempt: int, own_count: int, port: int, folder: Path, workers: int) -> None:
    """A rank of a run that was started again; the store outlives it. At the first attempt, rank 1 dies in mid-epoch."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": str(own_count)})
    store = dist.PrefixStore(f"attempt {attempt}", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    stream = StreamingBuckets(Shuffled(5), RULE, 2, caption_column="text", buffer_size=10)
    context, steps = QUICK if workers else None, []
    for epoch in range(3):
        stream.set_epoch(epoch)
        for batch in DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context):
            steps.append([int(caption) for caption in batch["caption"]])
            if (rank, attempt, epoch, len(steps) % 5) == (1, 0, 1, 0):
                os._exit(1)
    (folder / f"rank{rank}.json").write_text(json.dumps(steps), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def restarted(folder: Path, counts: tuple[int, int], workers: int) -> list[list[list[int]]]:
    """Per rank what it trained in each step after an elastic restart, with a restart count of each rank's own node."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt, of_ranks in enumerate([(0, 0), counts]):
        processes = [
            QUICK.Process(target=elastic_rank, args=(rank, attempt, of_ranks[rank], server.port, folder, workers))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        processes[1].join(timeout=300)
        assert processes[1].exitcode == 1 - attempt
        if attempt == 0:
            processes[0].terminate()  # it waits for rank 1, as torchrun's agent finds it
        processes[0].join(timeout=300)
    assert processes[0].exitcode == 0
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


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
