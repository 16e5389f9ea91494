"""A store in S3, over its real protocol, from a server on this machine."""

import os
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from kohya_bucket.errors import LatentStoreError, StorageError
from kohya_bucket.images import remote
from kohya_bucket.latents.maintenance import pack, prune, status, verify, verify_files
from kohya_bucket.latents.store import storage
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.trainers.sdscripts.npz.names import paths_beside
from tests.command_line import Command, command_line  # noqa: F401
from tests.latents.latent_helpers import bits, fill, same
from tests.object_storage import s3_server
from tests.warm import QUICK

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


@pytest.mark.parametrize("gigabytes", ["0", "1"])
def test_what_one_process_wrote_another_gathers(address, monkeypatch, gigabytes):
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
    receiver, sender = QUICK.Pipe(duplex=False)
    process = QUICK.Process(target=reader, args=(sender, address, dict(os.environ), order))
    process.start()
    assert receiver.recv() == [want[NAMES[i]].tobytes() for i in order]
    process.join()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_workers_read_what_the_process_before_them_read(address, start):
    import torch

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
    assert f"cache prune {address} --damaged" in err
    assert command_line("cache", "status", address)[0] == 0


def test_one_of_many_creates_a_file(address):
    StoreWriter(address)
    made, together = [], threading.Barrier(4)

    def create(k):
        together.wait(30)
        try:
            storage.create(f"{address}/shards/a", b"%d" % k)
            made.append(k)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert storage.read_ranges([storage.Range(f"{address}/shards/a", 0, 1)]) == [b"%d" % made[0]]


def writes(address, environment, first, last, told):
    """Another process that writes a store, shard after shard, of which some items are another's too."""
    os.environ.update(environment)
    told.recv()
    fill(address, [f"{i:02d}" for i in range(first, last)], shard_bytes=100)
    write_manifest(LatentStore(address))


def test_two_processes_that_write_at_once_lose_nothing(address):
    processes, tellers = [], []
    for first, last in ((0, 7), (4, 11)):
        receiver, teller = QUICK.Pipe(duplex=False)
        tellers.append(teller)
        processes.append(QUICK.Process(target=writes, args=(address, dict(os.environ), first, last, receiver)))
        processes[-1].start()
    for teller in tellers:
        teller.send("begin")
    for process in processes:
        process.join()
        assert process.exitcode == 0
    store = LatentStore(address)
    assert (store.damage, verify(store), store.replaced_rows()) == ([], [], 3)
    assert store.strings("source") == [f"{i:02d}" for i in range(11)]
    for i in range(11):
        assert any(same(store.read(i), bits(seed)) for seed in ([i] if i < 7 else []) + ([i - 4] if i > 3 else []))


def test_a_shard_is_sent_in_one_request_so_that_nothing_stays_of_one_that_breaks_off(address, monkeypatch):
    """Of several, S3 keeps what was sent, where no listing shows it."""
    system, asked = storage.storage_of(address)[0], []

    async def ask(method, **_):
        asked.append(method)
        return {"UploadId": "1", "ETag": "1"}

    monkeypatch.setattr(system, "_call_s3", ask)
    storage.create(f"{address}/shards/large", bytes(256 << 20))
    assert asked == ["put_object"]


def test_a_file_whose_answer_was_lost_is_ones_own(address, monkeypatch):
    """Also where the client remembers a listing without it."""
    storage.create(f"{address}/shards/a", b"another")
    assert len(storage.listing(f"{address}/shards")) == 1
    system, _ = storage.storage_of(address)
    pipe = system.pipe_file

    def lost(path, data, **options):
        monkeypatch.setattr(system, "pipe_file", pipe)
        type(system)(skip_instance_cache=True).pipe_file(path, data, **options)
        raise ConnectionResetError

    monkeypatch.setattr(system, "pipe_file", lost)
    storage.create(f"{address}/shards/b", b"mine")
    with pytest.raises(FileExistsError):
        storage.create(f"{address}/shards/b", b"another's")


class Faulty(BaseHTTPRequestHandler):
    """Answers with an error, or with half of what it says."""

    asked: ClassVar[list[str]] = []
    status = 503

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(self.status)
        self.send_header("Content-Length", "4" if self.status == 206 else "0")
        self.end_headers()
        if self.status == 206:
            self.wfile.write(b"ha")

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("status", [503, 206], ids=["busy", "cut off"])
def test_a_server_that_fails_is_asked_no_more_often_than_is_said(bucket, monkeypatch, status):
    waits = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    monkeypatch.setattr(Faulty, "asked", [])
    monkeypatch.setattr(Faulty, "status", status)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    other = remote.storage_of(bucket)[0]
    other = type(other)(client_kwargs={"endpoint_url": address}, skip_instance_cache=True)
    monkeypatch.setattr(remote, "_system", lambda *_: other)
    try:
        with pytest.raises(StorageError, match=r"\(7 tries"):
            storage.read_ranges([storage.Range(f"{bucket}/a", 0, 4)])
    finally:
        server.shutdown()
        server.server_close()
    assert len(Faulty.asked) == 7
    assert 6 < sum(waits) < 13


def test_a_bucket_that_is_not_there_is_said(bucket, monkeypatch):
    with pytest.raises(StorageError, match=r"s3://absent/latents.*such bucket"):
        StoreWriter("s3://absent/latents")


def test_without_an_account_that_is_said_at_once():
    asked = []

    def ask():
        asked.append(1)
        raise OSError("NoCredentialsError: Unable to locate credentials") from NoCredentialsError()

    NoCredentialsError = pytest.importorskip("botocore.exceptions").NoCredentialsError
    with pytest.raises(StorageError, match="Unable to locate credentials"):
        storage._until_answered("s3://bucket/a: cannot be read", ask)
    assert asked == [1]


def test_npz_are_not_looked_for_in_object_storage(address, tmp_path, command_line: Command, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    fill(address, NAMES)
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    storage.create(f"{address}/images/a.png", (tmp_path / "a.png").read_bytes())
    for arguments, said in (
        (
            ("export", address, "--arch", "sdxl", "--output", f"{address}/npz"),
            f"{address}/npz: npz files are read from",
        ),
        (("import", f"{address}/images", "--arch", "sdxl", "-o", "latents"), "a.png: npz files are read from folders"),
    ):
        code, _, err = command_line("cache", *arguments)
        assert code == 2
        assert said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png"]
    with pytest.raises(LatentStoreError, match=r"a\.png: .*no npz can lie beside it"):
        paths_beside([f"{address}/images/a.png"], None, tmp_path)


def test_a_store_is_not_written_through_an_address_of_files(tmp_path):
    """Two writers could both make a file there, and a reader would see half of it."""
    with pytest.raises(StorageError, match="is written by the path of the folder"):
        StoreWriter(f"file://{tmp_path.as_posix()}/latents")
