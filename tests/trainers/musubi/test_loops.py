"""A loop that polls its threads, as musubi-tuner's do, is handed what is ready; its program encodes together."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cache_folder import Folder

from kohya_bucket.latents.encode.pipeline import Caching
from kohya_bucket.latents.vae.batches import BatchLimit
from kohya_bucket.trainers.musubi import caching
from kohya_bucket.trainers.musubi.caching import Saved, Session
from kohya_bucket.trainers.musubi.loops import Together, loop_over


class Dataset:
    """Its items are the numbers that its source fetches."""

    def __init__(self, count: int, rng: random.Random, batch_size: int) -> None:
        self.datasource: Any = [lambda number=number: self.fetch(number) for number in range(count)]
        self.rng, self.batch_size, self.resolution = rng, batch_size, (64, 64)

    def fetch(self, number: int) -> int:
        time.sleep(self.rng.random() / 300)
        return number


def polling(dataset: Dataset, num_workers: int) -> Iterator[list[int]]:
    executor, futures, items = ThreadPoolExecutor(num_workers), [], []
    for fetch in dataset.datasource:
        futures.append(executor.submit(lambda op: op(), fetch))
        while len(futures) >= num_workers:
            done = [future for future in futures if future.done()]
            assert done, "it would sleep here"
            items += [future.result() for future in done]
            futures = [future for future in futures if future not in done]
        while len(items) >= dataset.batch_size:
            yield items[: dataset.batch_size]
            items = items[dataset.batch_size :]
    yield from [items] if items else []
    executor.shutdown()


class Picked(SimpleNamespace):
    captions_alone = False

    @contextmanager
    def picking(self, _: Any) -> Iterator[None]:
        yield


@pytest.mark.parametrize("seed", range(6))
def test_a_loop_that_polls_never_has_to(seed: int) -> None:
    rng = random.Random(seed)
    dataset = Dataset(rng.choice([0, 1, 2, 25]), rng, rng.randrange(1, 5))
    session = cast("Any", Picked(caching=Caching("item", 25, keep=lambda _: None)))
    with loop_over(session, dataset, polling, rng.randrange(1, 5), {}) as batches:
        found = list(batches)
    assert [number for batch in found for number in batch] == list(range(len(dataset.datasource)))
    assert all(len(batch) == dataset.batch_size for batch in found[:-1])
    assert ThreadPoolExecutor.__module__.startswith("concurrent")


def items_of(folder: Folder, session: Session, count: int) -> list[Any]:
    out = []
    for number in range(count):
        item = SimpleNamespace(item_key=f"{number}.png", bucket_size=(64, 64), frame_count=None, number=number)
        setattr(item, caching._ORIGIN, (session, session.caches.table.sources[number]))
        out.append(item)
    return out


@pytest.mark.parametrize("room", [1, 2, 5, 100])
@pytest.mark.parametrize("mixes", [False, True])
def test_images_are_encoded_together_where_that_changes_none(tmp_path: Path, room: int, mixes: bool) -> None:
    folder = Folder(tmp_path, 9)
    session = Session(folder.caches(), text=False)
    cast("Any", session.caches.dataset).batch_size = 4
    saved, runs = dict[int, torch.Tensor](), list[int]()
    session.caching = Caching("item", 9, keep=lambda one: saved.update({one.item.number: one.tensors["latents"]}))

    def encode(batch: list[Any]) -> None:
        if len(batch) > room:
            raise RuntimeError("CUDA out of memory")
        runs.append(len(batch))
        latents = torch.stack([torch.full((2, 2), float(item.number)) for item in batch])
        latents = latents + torch.randn_like(latents) + (100.0 * len(batch) if mixes else 0.0)
        for item, latent in zip(batch, latents, strict=True):
            session.save(Saved(item, {"latents": latent}, print, text=False))

    items, encoder = items_of(folder, session, 9), Together(encode, BatchLimit("cpu", 4))
    with session.caching.running():
        for start in range(0, 9, 4):
            encoder.encode(items[start : start + 4])
    assert sorted(saved) == list(range(9))
    assert max(runs) == min(room, 4)
    if mixes:
        assert all(float(latent.mean()) < 9 + 100 + 5 for latent in saved.values())
        assert room == 1 or runs.count(1) >= 9
