"""Stores in object storage: what was written is what is read, whatever fails on the way."""

import math
import os
import random
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import KohyaBucketError, LatentStoreError, StorageError
from kohya_bucket.images import remote
from kohya_bucket.latents.maintenance import pack, prune, status, verify, verify_files
from kohya_bucket.latents.store import storage
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.remote_shards import NodeCache, RemoteRows
from kohya_bucket.latents.store.storage import Range, merged
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from tests.command_line import Command, command_line  # noqa: F401
from tests.latents.latent_helpers import SPACE, bits, entry, fill, same
from tests.latents.text_outputs import fill_texts, same_outputs
from tests.thinned import one_in
from tests.warm import QUICK

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

NAMES = [f"{i:02d}" for i in range(10)]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of what this node keeps."""
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS", str(tmp_path / "kept"))
    monkeypatch.delenv("KOHYA_BUCKET_SHARDS_GB", raising=False)
    return tmp_path / "kept"


@pytest.fixture
def address(kept):
    return f"memory://{uuid.uuid4().hex}/latents"


@pytest.fixture
def no_waits(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    return waits


def shards_of(kept):
    return [path for path in kept.glob("kohya_bucket_shards/*/*.safetensors") if path.name[0] != "."]


def until(happens):
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def overwritten(file, data):
    try:
        file.write_bytes(data)
    except PermissionError:  # as on Windows, while what brought it has it mapped
        return False
    return True


def system_of(address):
    return storage.storage_of(address)[0]


@pytest.mark.parametrize("given", ["s3:/bucket/latents", Path("s3://bucket/latents")], ids=["text", "path"])
def test_an_address_with_one_slash_is_no_folder(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LatentStoreError, match="an address begins with s3://"):
        fill(given, NAMES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gigabytes", ["0", ""])
def test_gathers_are_what_was_written(address, kept, monkeypatch, gigabytes):
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS_GB", gigabytes)
    want = fill(address, NAMES, shard_bytes=600, flip=True)
    store = LatentStore(address)
    assert store.layout.images_root().exists() is False
    random = np.random.default_rng(0)
    for _ in range(20):
        order = random.integers(0, len(NAMES), 4).tolist()
        flips = random.random(4) < 0.5
        got = store.gather(order, flips)
        for k, i in enumerate(order):
            assert same(got[k], bits(1000 + i) if flips[k] else want[NAMES[i]])
    if gigabytes == "0":
        assert isinstance(store._files.tensors(store.info(0))["latents"], RemoteRows)
        assert not kept.exists()
    else:
        until(lambda: len(shards_of(kept)) == len(store.shards))
        assert all(isinstance(store._files.tensors(store.info(i))["latents"], np.ndarray) for i in range(len(store)))
        assert same(store.gather([7, 0, 3, 3]), np.stack([want[NAMES[i]] for i in (7, 0, 3, 3)]))


def test_masks_and_whole_items_are_read_there(address, monkeypatch):
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS_GB", "0")
    mask = np.random.default_rng(0).integers(0, 256, (32, 64), dtype=np.uint8)
    with StoreWriter(address) as writer:
        for k, name in enumerate("abc"):
            writer.add(entry(name, mask=True), bits(k), mask=mask if name == "b" else None, space=SPACE)
    store = LatentStore(address)
    store.expect(range(3))
    assert [store.read_mask(i) is None for i in range(3)] == [True, False, True]
    assert same(store.read_mask(1), mask)
    assert same(store.read(2), bits(2))
    assert verify(store) == []


def test_status_verify_pack_and_prune_there(address, no_waits):
    want = fill(address, NAMES, shard_bytes=600)
    want |= fill(address, ["03"], dtype="float32")
    store = LatentStore(address)
    found = status(store)
    assert (found.items, found.superseded, found.unindexed, found.no_images) == (10, 1, 5, True)
    assert found.healthy
    assert verify(store) == []
    assert prune(store).dropped == 0
    assert status(LatentStore(address)).superseded == 0
    many = len(LatentStore(address).shards)
    assert pack(LatentStore(address)).copied == 10
    store = LatentStore(address)
    assert len(store.shards) == 2 < many
    assert store.indexed
    assert verify_files(store) == verify(store) == []
    for i, name in enumerate(NAMES):
        assert same(store.read(i), want[name])
    prune(store, drop=[0])
    assert LatentStore(address).strings("source") == NAMES[1:]


def test_a_store_is_carried_there_and_back(address, tmp_path):
    want = fill(tmp_path / "here", NAMES, shard_bytes=600, flip=True)
    pack(LatentStore(tmp_path / "here"), address)
    pack(LatentStore(address), tmp_path / "back")
    store = LatentStore(tmp_path / "back")
    assert all(same(store.read(i), want[name]) for i, name in enumerate(NAMES))
    assert pack(store, address).copied == len(NAMES)  # it is there, whole
    fill(tmp_path / "other", NAMES[:2])
    with pytest.raises(LatentStoreError, match="already holds another latent store"):
        pack(LatentStore(tmp_path / "other"), address)


def flip_byte(data, store, i):
    at = store.info(i).tensors["latents"].offset + int(store.column("row")[i]) * store.read(i).nbytes + 3
    return data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :]


def test_a_flipped_byte_in_the_storage_is_found(address, kept):
    want = fill(address, NAMES, shard_bytes=600)
    store = LatentStore(address).without_copies()  # its reading brings no shard to this node
    path = str(store.layout.shards / store.info(4).name)
    system = system_of(address)
    system.pipe_file(path, flip_byte(system.cat_file(path), store, 4))
    store = LatentStore(address)
    for i, name in enumerate(NAMES):
        if i == 4:
            with pytest.raises(LatentStoreError, match=r"04 in shard .*damaged \(checksum"):
                store.gather([4])
        else:
            assert same(store.gather([i])[0], want[name])
    assert verify(store) == [(4, "checksum of latents is wrong")]
    done = prune(LatentStore(address), damaged=True)
    assert [name for name, _ in done.damaged] == ["04"]
    assert LatentStore(address).strings("source") == [name for name in NAMES if name != "04"]


@pytest.mark.long
@pytest.mark.parametrize("seed", one_in(4, range(10)))
def test_a_bit_that_flips_on_the_way_is_read_again(address, kept, monkeypatch, seed):
    """Whatever is read, whenever it happens: nothing counts as damaged, and nothing is taken out."""
    rng = random.Random(seed)
    want = fill(address, NAMES, shard_bytes=600)
    write_manifest(LatentStore(address))
    fill(address, ["more"])
    system, real, calls = MemoryFileSystem, MemoryFileSystem.cat_ranges, [0]

    def flipping(self, *args, **more):
        answers = list(real(self, *args, **more))
        calls[0] += 1
        if calls[0] in flips:
            k = rng.randrange(len(answers))
            data = bytearray(answers[k])
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            answers[k] = bytes(data)
        return answers

    monkeypatch.setattr(system, "cat_ranges", flipping)
    first = rng.randrange(1, 30)
    flips = set(range(first, 200, 11))
    store = LatentStore(address)
    assert store.damage == []
    for i, name in enumerate(NAMES):
        assert same(store.read(i), want[name])
    assert verify(store) == []
    assert verify_files(store) == []
    assert prune(LatentStore(address), damaged=True).damaged == []
    assert calls[0] > first


def test_a_byte_that_flips_on_this_node_is_read_again_from_the_storage(address, kept):
    want = fill(address, NAMES)
    store = LatentStore(address)
    store.gather([0])
    until(lambda: shards_of(kept))
    (file,) = shards_of(kept)
    damaged = flip_byte(file.read_bytes(), store, 4)  # which reads it, and finds it right
    store.release()  # as where others are mapped in between
    file.write_bytes(damaged)
    assert isinstance(store._files.tensors(store.info(4))["latents"], np.ndarray)
    assert same(store.gather([4])[0], want["04"])
    store._files._looked = -math.inf  # Windows keeps a file that is mapped until a later look
    assert same(store.gather([4])[0], want["04"])
    assert not file.exists() or file.read_bytes() != damaged  # it may have been brought again
    assert same(store.gather([4])[0], want["04"])


@pytest.mark.parametrize("damaged", ["spans", "mask"])
def test_a_caption_that_is_damaged_on_this_node_is_read_again_from_the_storage(address, kept, tmp_path, damaged):
    fill_texts(tmp_path / "here", 3)
    here = LatentStore(tmp_path / "here")
    pack(here, address)
    store = LatentStore(address)
    store.arrays(0)
    info = store.info(0)
    file = store._files._cache.folder / info.name
    until(file.exists)
    data = bytearray(file.read_bytes())
    data[info.tensors[damaged].offset] ^= 8
    store.release()
    until(lambda: overwritten(file, data))
    store = LatentStore(address)
    for i in range(len(store)):
        same_outputs(store.arrays(i), here.arrays(i))


class Failing(MemoryFileSystem):
    """Memory that does not answer some requests."""

    protocol = "failing"
    fails = 0
    error: type[Exception] = ConnectionError

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("failing://", "memory://"))

    def _maybe(self):
        if Failing.fails:
            Failing.fails -= 1
            raise Failing.error("the line is busy")

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._maybe()
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(path, value, mode, **kwargs)
        self._maybe()  # what was asked for is done, and nobody heard of it


fsspec.register_implementation("failing", Failing, clobber=True)


def test_what_fails_is_tried_again_after_longer_and_longer_waits(kept, monkeypatch, no_waits):
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS_GB", "0")
    address = f"failing://{uuid.uuid4().hex}/latents"
    Failing.fails = 3
    want = fill(address, NAMES)
    assert Failing.fails == 0
    store = LatentStore(address)
    no_waits.clear()
    Failing.fails = 5
    draws = random.getstate()
    assert same(store.gather([3])[0], want["03"])
    assert random.getstate() == draws
    assert len(no_waits) == 5
    for turn, wait in enumerate(no_waits):
        assert 0.1 * 2**turn <= wait <= 0.2 * 2**turn
    Failing.fails = 7
    with pytest.raises(StorageError, match=r"safetensors: cannot be read: the line is busy \(7 tries in .* s\)"):
        store.gather([4])
    Failing.error, Failing.fails = PermissionError, 1
    with pytest.raises(StorageError, match="check your access"):
        store.gather([4])
    Failing.error, Failing.fails = ConnectionError, 0
    assert same(store.gather([4])[0], want["04"])


def test_storage_that_does_not_answer_is_not_taken_for_damage(kept, no_waits):
    address = f"failing://{uuid.uuid4().hex}/latents"
    fill(address, NAMES)
    write_manifest(LatentStore(address))
    Failing.fails = 7
    try:
        with pytest.raises(StorageError):
            LatentStore(address)
    finally:
        Failing.fails = 0
    assert LatentStore(address).damage == []


def test_two_writers_lose_nothing(address):
    wants = [{}, {}]
    together = threading.Barrier(2)

    def write(k):
        together.wait(30)
        wants[k] = fill(address, [f"{k}{name}" for name in NAMES], shard_bytes=600)
        write_manifest(LatentStore(address))

    threads = [threading.Thread(target=write, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store, want = LatentStore(address), wants[0] | wants[1]
    assert store.damage == []
    assert store.strings("source") == sorted(want)
    assert all(same(store.read(i), want[name]) for i, name in enumerate(sorted(want)))


def test_of_two_that_make_a_store_one_says_where_the_images_are(address, tmp_path):
    roots = [tmp_path / f"images{k}" for k in range(4)]
    threads = [threading.Thread(target=StoreWriter, args=(address,), kwargs={"images_root": root}) for root in roots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (tmp_path / "images0").mkdir()
    assert LatentStore(address).layout.images_root() in roots


class Careless(MemoryFileSystem):
    """Storage that replaces a file although it was asked not to."""

    protocol = "careless"

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("careless://", "memory://"))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(path, value, **kwargs)


class Old(Careless):
    """A library from before that could be asked."""

    protocol = "oldlibrary"

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("oldlibrary://", "memory://"))

    def pipe_file(self, path, value):
        super().pipe_file(path, value)


fsspec.register_implementation("careless", Careless, clobber=True)
fsspec.register_implementation("oldlibrary", Old, clobber=True)


@pytest.mark.parametrize("protocol", ["careless", "oldlibrary"])
def test_where_writers_could_undo_each_other_none_writes(protocol):
    address = f"{protocol}://{uuid.uuid4().hex}/latents"
    with pytest.raises(StorageError, match="does not refuse to replace a file") as refused:
        StoreWriter(address)
    assert "\n" not in str(refused.value)
    assert storage.listing(address) == {}


def test_precompute_writes_there_what_it_writes_here(address, tmp_path, images):
    from kohya_bucket import BucketedLatentDataset
    from kohya_bucket.latents import precompute_latents
    from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
    from tests.latents.stub_encoders import MeanEncoder, dataset_of

    for output in (address, tmp_path / "here"):
        report = precompute_latents(dataset_of(images), MeanEncoder(), output, flip=True)
        assert (report.encoded, report.failed) == (len(images), [])
        assert precompute_latents(dataset_of(images), MeanEncoder(), output, flip=True).current == len(images)
    there, here = LatentStore(address), LatentStore(tmp_path / "here")
    assert there.layout.images_root() == tmp_path / "images"
    assert status(there).healthy
    assert not status(there).no_images
    for i in range(len(here)):
        assert there.entry(i) == here.entry(i)
        assert same(there.read(i), here.read(i))
        assert same(there.read(i, flipped=True), here.read(i, flipped=True))
    trained = BucketedLatentDataset(address, flip=0.5)
    (bucket,) = set(trained.bucket_indices[:1])
    batch = np.flatnonzero(trained.bucket_indices == bucket).tolist()
    for item, i in zip(trained.__getitems__(batch), batch, strict=True):
        flips = [here.read(i).tobytes(), here.read(i, flipped=True).tobytes()]
        assert item["latents"].numpy().tobytes() in flips
    with pytest.raises(KohyaBucketError, match="npz files are read from folders"):
        precompute_latents(dataset_of(images), MeanEncoder(), NpzFiles("sd", address))


def test_captions_are_stored_there(address, tmp_path):
    fill_texts(tmp_path / "here", 12)
    here = LatentStore(tmp_path / "here")
    pack(here, address)
    store = LatentStore(address)
    store.expect(range(len(store)))
    for i in range(len(store)):
        same_outputs(store.arrays(i), here.arrays(i))
    assert verify(store) == []


@pytest.mark.parametrize("how", ["status", "verify", "pack", "prune"])
def test_commands_take_an_address(address, command_line: Command, how):  # noqa: F811
    fill(address, NAMES, shard_bytes=600)
    code, out, err = command_line("cache", how, address)
    assert (code, err) == (0, "")
    if how == "status":
        assert out.startswith(f"{address}: 10 items")
    if how == "pack":
        assert "10 items copied; 4 shards before, 1 now" in out


def test_a_command_names_what_is_wrong_in_one_line(command_line: Command, no_waits, kept):  # noqa: F811
    code, _, err = command_line("cache", "status", "memory://nothing/here")
    assert code == 2
    assert "memory://nothing/here is not a latent store (or there is no such bucket): make one" in err
    code, _, err = command_line("cache", "status", "nowhere://nothing/here")
    assert code == 2
    assert "nowhere:// cannot be read here" in err
    assert len(err.splitlines()) == 1


def test_without_s3fs_what_to_install_is_said(command_line: Command, monkeypatch, kept):  # noqa: F811
    def filesystem(protocol):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", filesystem)
    remote._system.cache_clear()
    code, _, err = command_line("cache", "status", "s3://nothing/here")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "Install s3fs to access S3: pip install s3fs" in err


def test_a_limit_that_is_no_number_is_refused(address, monkeypatch):
    fill(address, NAMES[:1])
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS_GB", "much")
    with pytest.raises(KohyaBucketError, match="'much', but must be a number of gigabytes"):
        LatentStore(address)


spans = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1 << 26), st.integers(0, 1 << 21)), max_size=12)


@given(spans)
def test_merged_ranges_hold_each_range_once(found):
    given_ = [Range(url, start, start + length) for url, start, length in found]
    groups = merged(given_)
    assert sorted(k for _, inside in groups for k in inside) == list(range(len(given_)))
    for whole, inside in groups:
        assert whole.stop - whole.start <= max(storage._MOST, *(given_[k].stop - given_[k].start for k in inside))
        for k in inside:
            assert whole.url == given_[k].url
            assert whole.start <= given_[k].start <= given_[k].stop <= whole.stop
        read = sum(given_[k].stop - given_[k].start for k in inside)
        assert whole.stop - whole.start <= read + storage._GAP * (len(inside) - 1)


def read_all(told, address, kept, limit, seed, rounds):
    """A process that keeps shards of a store while it reads at random."""
    os.environ["KOHYA_BUCKET_SHARDS"], os.environ["KOHYA_BUCKET_SHARDS_GB"] = str(kept), str(limit / 1e9)
    store = LatentStore(address)
    store._files.whole = True
    random = np.random.default_rng(seed)
    wrong = 0
    for _ in range(rounds):
        for i in random.permutation(len(store)).tolist():
            wrong += not same(store.gather([i])[0], bits(i))
            time.sleep(0.002)
    told.send(
        (wrong, sum(isinstance(store._files.tensors(store.info(i))["latents"], np.ndarray) for i in range(len(store))))
    )


@pytest.mark.slow
def test_two_processes_keep_no_more_than_the_limit_together(tmp_path, kept):
    address = f"file://{tmp_path.as_posix()}/storage/latents"
    fill(tmp_path / "storage" / "latents", [f"{i:03d}" for i in range(40)], shard_bytes=600)
    write_manifest(LatentStore(tmp_path / "storage" / "latents"))
    store = LatentStore(address)
    limit = int(5.5 * max(info.nbytes for info in store.shards.values()))
    readers = []
    for seed in range(2):
        receiver, sender = QUICK.Pipe(duplex=False)
        process = QUICK.Process(target=read_all, args=(sender, address, kept, limit, seed, 5))
        process.start()
        readers.append((process, receiver))
    most = shards = 0
    while any(process.is_alive() for process, _ in readers):
        sizes = []
        for path in shards_of(kept):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:
                continue
        most, shards = max(most, sum(sizes)), max(shards, len(sizes))
        time.sleep(0.003)
    for process, receiver in readers:
        wrong, mapped = receiver.recv()
        assert wrong == 0
        assert mapped > 0
        process.join()
    assert most <= limit
    assert shards == 5


def test_an_order_that_goes_by_shards_keeps_them_however_large_the_store_is(address, kept, monkeypatch, caplog):
    from kohya_bucket import BucketBatchSampler, BucketedLatentDataset

    fill(address, NAMES, shard_bytes=600)
    most = max(info.nbytes for info in LatentStore(address).shards.values())
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS_GB", str(2.5 * most / 1e9))
    for order in ("shuffled", "local"):
        dataset = BucketedLatentDataset(address)
        sampler = BucketBatchSampler(
            dataset, batch_size=2, order=order, **{"open_shards": 2} if order == "local" else {}
        )
        for batch in sampler:
            dataset.__getitems__(batch)
        if order == "shuffled":
            assert not shards_of(kept)
    until(lambda: len(shards_of(kept)) == 2)
    assert not caplog.messages
    BucketBatchSampler(dataset, batch_size=2, order="local", open_shards=3)
    (said,) = caplog.messages
    assert said.startswith(f"{address}: order 'local' reads 3 shards at a time, of up to")
    assert "Raise KOHYA_BUCKET_SHARDS_GB, or lower open_shards" in said


X, Y = (f"64x64-bfloat16-{letter * 16}.safetensors" for letter in "ab")


def test_a_folder_that_keeps_nothing_is_said_once(address, kept, caplog):
    kept.touch()  # a file in its place
    cache = NodeCache(address)
    assert not cache.keep(X, 500, half_a_kilobyte)
    assert not cache.keep(Y, 500, half_a_kilobyte)
    (said,) = caplog.messages
    assert said.startswith("a shard is not cached on this node, and is read by requests: ")
    assert str(kept) in said


def half_a_kilobyte(file):
    file.write(b"x" * 500)


def test_what_a_killed_process_left_makes_room_in_time(kept, address):
    fill(address, NAMES)
    cache = NodeCache(address)
    assert cache.keep(Y, 500, half_a_kilobyte)
    cache.discard(Y)
    part = cache.folder / f".{X}.0123456789ab.tmp"
    part.write_bytes(b"x" * 500)
    tight = NodeCache(address, limit=900)
    assert not tight.keep(Y, 500, half_a_kilobyte)
    os.utime(part, (1, 1))
    assert tight.keep(Y, 500, half_a_kilobyte)
    assert sorted(path.name for path in cache.folder.iterdir()) == [Y]


def test_what_another_process_is_bringing_is_not_brought_again(kept, address):
    here, other = NodeCache(address, limit=900), NodeCache(address, limit=900)

    def meanwhile(file):
        assert not other.keep(X, 500, half_a_kilobyte)  # this one
        assert not other.keep(Y, 500, half_a_kilobyte)  # there is no room besides
        half_a_kilobyte(file)

    assert here.keep(X, 500, meanwhile)
    assert other.keep(X, 500, meanwhile)
    assert sorted(path.name for path in here.folder.iterdir()) == [X]


def test_of_two_that_bring_a_shard_at_once_each_leaves_it_whole(kept, address, monkeypatch):
    here, other = NodeCache(address), NodeCache(address)

    def meanwhile(file):
        half_a_kilobyte(file)
        monkeypatch.setattr(other, "_files", lambda **_: {})  # as if it had looked a moment before
        assert other.keep(X, 500, half_a_kilobyte)

    assert here.keep(X, 500, meanwhile)
    assert [(path.name, path.read_bytes()) for path in here.folder.iterdir()] == [(X, b"x" * 500)]


def test_of_two_that_begin_at_once_the_first_by_name_goes_on_and_a_shard_counts_once(kept, address, monkeypatch):
    cache = NodeCache(address, limit=1200)
    assert cache.keep(Y, 500, half_a_kilobyte)
    rival, looks, files = cache.folder / f".{X}.{'0' * 12}.tmp", [], cache._files

    def look(coming):
        looks.append(coming)
        if len(looks) == 2:  # the other one began after the first look
            rival.write_bytes(b"x" * 500)
        return files(coming)

    monkeypatch.setattr(cache, "_files", look)
    assert not cache.keep(X, 500, lambda _: pytest.fail("it is brought twice"))
    rival.rename(cache.folder / f".{X}.{'f' * 12}.tmp")
    looks.clear()
    monkeypatch.setattr(cache, "_files", lambda coming: files(coming) if looks else looks.append(coming) or {})
    assert cache.keep(X, 500, half_a_kilobyte)
    assert cache.holds(Y, 500)


def test_a_shard_in_use_that_cannot_be_removed_stays(kept, address, monkeypatch):
    cache = NodeCache(address, limit=900)
    assert cache.keep(X, 500, half_a_kilobyte)
    unlink = Path.unlink

    def in_use(path, **options):
        if path.name == X:
            raise PermissionError(13, "in use")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", in_use)
    assert not cache.keep(Y, 500, half_a_kilobyte)
    assert sorted(path.name for path in cache.folder.iterdir()) == [X]


def test_files_of_others_stay_where_shards_are_kept(kept, address):
    """Whatever lies beside it, in folders of like names too: only shards in our own folder make room for others."""
    models = [
        kept / "models" / "sdxl.safetensors",
        kept / "0123456789abcdef" / X,
        kept / "kohya_bucket_shards" / "models" / "sdxl.safetensors",
        kept / "kohya_bucket_shards" / "0123456789abcdef" / "lora.safetensors",
        kept / "kohya_bucket_shards" / "0123456789abcdef" / f"copy of {X}",
        kept / "kohya_bucket_shards" / "0123456789abcdef" / ".lora.safetensors.0123456789ab.tmp",
        kept / "kohya_bucket_shards" / "models" / f".{X}.0123456789ab.tmp",
    ]
    assert NodeCache(address).keep(X, 500, half_a_kilobyte)
    for path in models:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"w" * 2000)
        os.utime(path, (1, 1))
    assert NodeCache(address, limit=900).keep(Y, 500, half_a_kilobyte)  # in the place of the first
    assert all(path.read_bytes() == b"w" * 2000 for path in models)
    assert [path.name for path in NodeCache(address).folder.iterdir()] == [Y]


def test_a_folder_of_our_name_that_is_not_ours_is_left_alone(kept, address, caplog):
    (kept / "kohya_bucket_shards" / "0123456789abcdef").mkdir(parents=True)
    (kept / "kohya_bucket_shards" / "0123456789abcdef" / X).write_bytes(b"w" * 500)
    assert not NodeCache(address, limit=900).keep(Y, 500, half_a_kilobyte)
    (said,) = caplog.messages
    assert "kohya_bucket_shards was not made by kohya_bucket" in said
    assert [path.name for path in kept.rglob("*.*")] == [X]


def test_the_home_folder_is_meant_where_the_variable_begins_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS", "~/kept")
    for home in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(home, str(tmp_path))
    assert NodeCache("s3://bucket/store").root.parent == tmp_path / "kept"
