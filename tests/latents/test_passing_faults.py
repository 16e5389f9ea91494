"""A fault that passes deletes nothing and replaces nothing: only bytes that were read and are wrong are damage."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from kohya_bucket.errors import KohyaBucketError, LatentStoreError, UnreadableError, may_pass, reading
from kohya_bucket.images import origins, stamps
from kohya_bucket.latents import LatentStore, precompute_latents
from kohya_bucket.latents.store import contents, storage
from kohya_bucket.latents.store.writer import StoreWriter
from tests.faults import PASSING, Faults
from tests.latents.latent_helpers import SPACE, bits, entry, fill, same
from tests.latents.stub_encoders import MeanEncoder, dataset_of
from tests.thinned import one_in

SEEDS = int(os.environ.get("KOHYA_BUCKET_SEEDS", "12"))  # of each command


def items(root):
    """Every item with its caption and its bytes, whichever shard it lies in."""
    store = LatentStore(root)
    return {store.entry(i).source: (store.entry(i), store.read(i).tobytes()) for i in range(len(store))}


def files(root):
    return {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".tmp"}


@pytest.fixture
def good(tmp_path, images):
    """A store with captions that only its manifest has, replaced rows, and shards that no manifest names."""
    root = tmp_path / "good"
    run = {"dtype": "float32"}
    precompute_latents(dataset_of(images[:6]), MeanEncoder(), root, images_root=images[0].parent)
    precompute_latents(dataset_of(images[:6]), MeanEncoder(), root, images_root=images[0].parent, **run)
    captions = [f"newer {k}" for k in range(6)]
    precompute_latents(dataset_of(images[:6], captions), MeanEncoder(), root, images_root=images[0].parent, **run)
    manifests = [path for path in root.iterdir() if path.name.startswith("manifest")]
    kept = {path: path.read_bytes() for path in manifests}
    precompute_latents(dataset_of(images[6:]), MeanEncoder(), root, images_root=images[0].parent)
    for path in root.glob("manifest*"):
        path.unlink()
    for path, data in kept.items():
        path.write_bytes(data)
    assert LatentStore(root).strings("caption")[:6] == captions
    assert LatentStore(root).unindexed
    return root


COMMANDS = {
    "status": ["cache", "status", "{root}"],
    "verify": ["cache", "verify", "{root}", "--quiet"],
    "prune": ["cache", "prune", "{root}"],
    "prune --damaged": ["cache", "prune", "{root}", "--damaged", "--image-dir", "{images}"],
    "prune --stale --gone": ["cache", "prune", "{root}", "--stale", "--gone"],
    "pack": ["cache", "pack", "{root}"],
    "pack --output": ["cache", "pack", "{root}", "--output", "{out}"],
    "export": ["cache", "export", "{root}", "--arch", "sd", "--output", "{out}", "--quiet"],
    "precompute": [],
}


@pytest.mark.long
@pytest.mark.parametrize("command", one_in(4, COMMANDS))
def test_a_fault_that_passes_takes_nothing_out(good, tmp_path, images, command, command_line, monkeypatch):
    root, out = good.with_name("tried"), tmp_path / "out"
    faults = Faults(root, images[0].parent)
    wanted = dataset_of(images, [f"newest {path.name}" for path in images])
    faults.install(monkeypatch)

    def run():
        if command == "precompute":
            try:
                done = precompute_latents(wanted, MeanEncoder(), root, dtype="float32")
            except KohyaBucketError as error:
                return 1, "", str(error)
            return bool(done.failed), "", str(done.failed)
        words = {"root": root, "images": images[0].parent, "out": out}
        return command_line(*(word.format(**words) for word in COMMANDS[command]))

    def anew():
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(good, root)

    anew()
    before, all_before = items(root), files(root)
    with faults.at(range(0), 0):
        usual = run()[0]
    calls, after = faults.calls, items(root)
    assert calls > 5
    for seed in range(SEEDS):
        rng = random.Random(f"{command} {seed}")
        anew()
        first = rng.randrange(1, calls + 1)
        code = rng.choice(PASSING)
        with faults.at(range(first, first + rng.choice([1, 1, 3, 10**9])), code):
            ended, _, errors = run()
        if faults.failed and ended != usual:
            case = f"seed {seed}, call {first}: {faults.failed[:2]}: {errors}"
            assert ended == 1, case
            assert "Traceback" not in errors, case
            assert os.strerror(code).lower() in errors.lower(), case
            assert any(Path(name).name in errors for name in faults.failed), case
            there = files(root)
            assert {path: there.get(path) for path in all_before} == all_before, case
            found = items(root)  # what was finished before the fault is whole, and stays
            assert found.keys() >= before.keys(), case
            assert all(item in (before.get(name), after.get(name)) for name, item in found.items()), case
        else:
            assert items(root) == after, (seed, first, faults.failed[:2])


def test_a_hash_stays_where_its_image_cannot_be_read_now(tmp_path, images, monkeypatch):
    def precompute():
        precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "store", content_hash=True)
        return LatentStore(tmp_path / "store").strings("source_hash")

    def hash_file(path):
        if path == str(images[1]):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return stamps.hash_file(path)

    hashes = precompute()
    monkeypatch.setattr(origins, "hash_file", hash_file)
    assert precompute() == hashes


def test_what_is_written_after_a_fault_that_passed_counts_over_all_before(tmp_path, monkeypatch):
    fill(tmp_path, ["a", "b", "c"])
    real, failed = contents.self_described, []

    def described(*args):
        if not failed:
            failed.append(args)
            raise UnreadableError("cannot be read now")
        return real(*args)

    monkeypatch.setattr(contents, "self_described", described)
    with pytest.raises(UnreadableError), StoreWriter(tmp_path, shard_bytes=1) as writer:  # which keeps what it has
        writer.add(entry("c"), bits(7), space=SPACE)
    store = LatentStore(tmp_path)
    assert same(store.read(int(store.find(["c"])[0])), bits(7))


@pytest.mark.parametrize("code", [errno.ELOOP, errno.ENODEV, *PASSING])
def test_what_does_not_pass_is_not_said_to_pass(code):
    with pytest.raises(UnreadableError) as refused, reading("a"):
        raise OSError(code, os.strerror(code))
    assert ("run again" in str(refused.value)) == may_pass(OSError(code, "")) == (code in PASSING)


@pytest.mark.posix("Windows says that there is no such path")
def test_what_would_lie_in_a_file_is_not_there(tmp_path):
    (tmp_path / "file").touch()
    assert not storage.is_there(tmp_path / "file" / "store")
    with pytest.raises(LatentStoreError, match="is not a latent store"):
        LatentStore(tmp_path / "file")
    images = origins.Origins.named([tmp_path / "file" / name for name in ("a.png", "a.tar#a", "a.parquet#1")])
    assert images.stamps()[0].tolist() == [-1, -1, -1]


@pytest.mark.posix("names of 255 bytes")
def test_a_name_that_no_file_can_have_is_that_of_none(tmp_path):
    with pytest.raises(FileNotFoundError), reading(tmp_path / ("n" * 256)):
        (tmp_path / ("n" * 256)).stat()
