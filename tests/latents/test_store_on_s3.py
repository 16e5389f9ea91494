"""A store in S3, over its real protocol, from a server on this machine."""

from __future__ import annotations

import os
import pickle
import threading

import numpy as np
import pytest

from kohya_bucket.errors import StorageError
from kohya_bucket.latents.maintenance.pack import pack
from kohya_bucket.latents.maintenance.prune import prune
from kohya_bucket.latents.remote import quick_ranges, storage
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.state import status, verify, verify_files
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from tests.command_line import Command, command_line  # noqa: F401
from tests.latents.latent_helpers import bits, fill, same
from tests.object_storage import s3_server
from tests.warm import QUICK

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
NAMES = [f"{i:02d}" for i in range(10)]


@pytest.fixture(scope="module")
def bucket():
    with s3_server():
        import s3fs

        s3fs.S3FileSystem().mkdir("training")
        yield "s3://training"


@pytest.fixture
def address(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS", str(tmp_path / "kept"))
    return f"{bucket}/{tmp_path.name}/latents"


def reader(told, address, environment, wanted):
    """Another process that reads a store."""
    os.environ.update(environment)
    told.send([LatentStore(address).gather([i])[0].tobytes() for i in wanted])


@pytest.mark.parametrize("client", ["fsspec", "obstore"])
@pytest.mark.parametrize("gigabytes", ["0", "1"])
def test_what_one_process_wrote_another_gathers(address, monkeypatch, gigabytes, client):
    if client == "fsspec":
        monkeypatch.setattr(quick_ranges, "_left_to_fsspec", {"training"})
    else:
        pytest.importorskip("obstore", reason="obstore is not installed")
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS_GB", gigabytes)
    want = fill(address, NAMES, shard_bytes=600, flip=True)
    store = LatentStore(address)
    write_manifest(store)
    store = pickle.loads(pickle.dumps(LatentStore(address)))
    assert store.indexed
    order = [7, 0, 3, 3]
    for _ in range(3):
        assert same(store.gather(order), np.stack([want[NAMES[i]] for i in order]))
        assert same(store.gather(order, [True] * 4), np.stack([bits(1000 + i) for i in order]))
    if client == "obstore":
        assert quick_ranges.ranges_by_obstore([(f"{address}/store.json", 0, 1)]) == [b"{"]
    receiver, sender = QUICK.Pipe(duplex=False)
    process = QUICK.Process(target=reader, args=(sender, address, dict(os.environ), order))
    process.start()
    assert receiver.recv() == [want[NAMES[i]].tobytes() for i in order]
    process.join()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_workers_read_what_the_process_before_them_read(address, start):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if start not in torch.multiprocessing.get_all_start_methods():
        pytest.skip(f"no {start} here")
    from torch.utils.data import DataLoader

    from kohya_bucket import BucketBatchSampler, BucketedLatentDataset

    want = fill(address, NAMES, shard_bytes=600, dtype="float16")
    dataset = BucketedLatentDataset(address, scaled=False)
    assert dataset[0]["latents"].numpy().tobytes() == want["00"].tobytes()
    loader = DataLoader(
        dataset, batch_sampler=BucketBatchSampler(dataset, batch_size=2), num_workers=2, multiprocessing_context=start,
        timeout=120,
    )  # fmt: skip
    read = {path: latents.numpy().tobytes() for batch in loader
            for path, latents in zip(batch["path"], batch["latents"], strict=True)}  # fmt: skip
    assert read == {name: value.tobytes() for name, value in want.items()}


def test_upkeep_and_its_commands(address, command_line: Command):  # noqa: F811
    want = fill(address, NAMES, shard_bytes=600)
    fill(address, ["03"])
    assert status(LatentStore(address)).superseded == 1
    assert prune(LatentStore(address)).dropped == 0
    assert pack(LatentStore(address)).copied == 10
    store = LatentStore(address)
    assert (len(store.shards), store.indexed, status(store).superseded) == (1, True, 0)
    assert verify_files(store) == verify(store) == []
    for i, name in enumerate(NAMES):
        assert same(store.read(i), bits(0) if name == "03" else want[name])
    path = str(store.layout.shards / store.info(4).name)
    at = store.info(4).tensors["latents"].offset + 4 * store.read(4).nbytes
    system = storage.storage_of(path)[0]
    data = bytearray(system.cat_file(path))
    data[at] ^= 1
    system.pipe_file(path, bytes(data))
    code, out, err = command_line("cache", "verify", address)
    assert code == 1
    assert "04: checksum of latents is wrong" in out
    assert f"cache repair {address}" in err
    assert command_line("cache", "status", address)[0] == 0


def test_one_of_many_creates_a_file(address):
    StoreWriter(address)
    made, together = [], threading.Barrier(4)

    def create(k):
        together.wait(30)
        try:
            storage.create(f"{address}/work/a.0.claim", b"%d" % k)
            made.append(k)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert storage.read_ranges([storage.Range(f"{address}/work/a.0.claim", 0, 1)]) == [b"%d" % made[0]]


def test_a_bucket_that_is_not_there_is_said(bucket, monkeypatch):
    with pytest.raises(StorageError, match=r"s3://absent/latents.*no such bucket"):
        StoreWriter("s3://absent/latents")
