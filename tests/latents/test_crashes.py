"""Killed at any instant, out of disk, without permission: what is finished stays, the next run does the rest."""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.latents import LatentStore, StoreWriter, precompute_latents
from kohya_bucket.latents.encode import worker
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.latents.maintenance import prune, verify
from kohya_bucket.latents.vae.encoder import encoder_hash
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.check import npz_entry
from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles, NpzSink
from kohya_bucket.trainers.sdscripts.npz.names import npz_path
from kohya_bucket.trainers.sdscripts.npz.read_write import NpzLatents, read_npz, write_npz
from tests.latents.crash_child import encode
from tests.latents.latent_helpers import why_npz_bad
from tests.latents.stub_encoders import SIZES, MeanEncoder, PosteriorStub, dataset_of, make_images
from tests.warm import QUICK

MANY = SIZES * 5
KILLS = int(os.environ.get("KOHYA_BUCKET_KILLS", "12"))


class PrecomputeWorker:
    """One run in a process of its own, by now at its work."""

    def __init__(self, images, output, *arguments, **settings):
        self._told, teller = QUICK.Pipe(duplex=False)
        self._process = QUICK.Process(target=encode, args=(teller, images, output, *arguments), kwargs=settings)
        self._process.start()
        teller.close()

    def wait_for(self, word):
        while self._told.recv() != word:
            pass

    def result(self):
        while not isinstance(told := self._told.recv(), dict):
            pass
        self._process.join()
        assert self._process.exitcode == 0
        return told

    def kill(self):
        self._process.kill()
        self._process.join()
        self._told.close()


def run_whole(*arguments):
    """A run to its end; returns how many it encoded and how long that took."""
    run = PrecomputeWorker(*arguments)
    run.wait_for("ready")
    started = time.monotonic()
    return run.result()["encoded"], time.monotonic() - started


def run_killed(images, output, format, seconds):
    run = PrecomputeWorker(images, output, format, 0.002)
    run.wait_for("ready")
    time.sleep(seconds)
    run.kill()


def check_store(root, images, want):
    """Everything that is there is whole and right; returns how much that is."""
    if not (root / "shards").is_dir():
        return 0
    store = LatentStore(root)
    assert store.damage == []
    assert verify(store) == []
    for i in range(len(store)):
        assert store.read(i).tobytes() == want[store.entry(i).source]
    return len(store)


@pytest.mark.weekly
def test_killed_at_random_instants_a_store_keeps_what_is_finished(tmp_path):
    images = make_images(tmp_path / "images", MANY)
    precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "whole")
    whole = LatentStore(tmp_path / "whole")
    want = {whole.entry(i).source: whole.read(i).tobytes() for i in range(len(whole))}
    chance = random.Random(0)
    counts = []
    out = tmp_path / "out"
    run_whole(tmp_path / "images", tmp_path / "first", "shards", 0.002)
    _, lasts = run_whole(tmp_path / "images", tmp_path / "second", "shards", 0.002)
    for _ in range(KILLS):
        if counts and counts[-1] == len(images):
            shutil.rmtree(out)
            counts.append(0)
        run_killed(tmp_path / "images", out, "shards", chance.uniform(0, 0.7 * lasts))
        now = check_store(out, images, want)
        assert now >= (counts[-1] if counts else 0)
        counts.append(now)
    partial = sum(0 < n < len(images) for n in counts)
    assert partial > KILLS // 4 or KILLS < 100  # few may all miss, on a machine that is busy otherwise
    assert run_whole(tmp_path / "images", out, "shards", 0.002)[0] == len(images) - counts[-1]
    assert check_store(out, images, want) == len(images)
    for path in out.rglob(".*.tmp"):
        os.utime(path, (1, 1))
    prune(LatentStore(out))
    assert not list(out.rglob(".*.tmp"))
    print(f"{KILLS} killed, {partial} of them with a part done")


@pytest.mark.weekly
def test_killed_at_random_instants_npz_are_whole_or_absent(tmp_path):
    """Files that are new, and files that replace stale ones: each is the old or the new one, and none is lost."""
    images = make_images(tmp_path / "images", MANY)
    dataset = dataset_of(images)
    arch, chance, out = ARCHITECTURES["sd"], random.Random(1), tmp_path / "out"
    encoding = EncodeOptions(encoder_hash(PosteriorStub()), "float32", "latents", True)
    buckets = [tuple(map(int, size)) for size in dataset.placement.bucket_sizes]
    names = [npz_path(p.name, tuple(map(int, dataset.sizes[i])), arch).name for i, p in enumerate(images)]
    run_whole(tmp_path / "images", out, "npz", 0.002)
    _, lasts = run_whole(tmp_path / "images", tmp_path / "whole", "npz", 0.002)
    want = [read_npz(tmp_path / "whole" / name, bucket, arch) for name, bucket in zip(names, buckets, strict=True)]
    assert len({(item.latents.tobytes(), item.flipped.tobytes()) for item in want}) == len(images)

    def check():
        """Which items are there as wanted; whatever is there, is whole."""
        wanted = LatentItems.from_placement([str(p) for p in images], dataset.sizes, dataset.placement, encoding,
                                       tmp_path / "images")  # fmt: skip
        current = set()
        for i, (name, bucket) in enumerate(zip(names, buckets, strict=True)):
            if (out / name).exists():
                found = read_npz(out / name, bucket, arch)
                assert np.array_equal(found.latents, want[i].latents)
                assert np.array_equal(found.flipped, want[i].flipped)
                assert why_npz_bad(out / name, bucket, arch, flip=True, content=True) is None
                if not npz_entry(out / name, wanted.entry(i), arch, images[i]).reasons:
                    current.add(i)
            else:
                assert not replacing
        return current

    replacing, last, seen, partial = True, set(range(len(images))), [], 0
    for n in range(KILLS):
        if len(last) == len(images):
            replacing = not replacing
            if replacing:
                for path in images:
                    os.utime(path, ns=(n, n * 10**9))
            else:
                shutil.rmtree(out)
            last = set()
        run_killed(tmp_path / "images", out, "npz", chance.uniform(0, 0.5 * lasts))
        now = check()
        assert last <= now
        partial += 0 < len(now) < len(images)
        last = now
        seen.append(len(now))
    assert partial > KILLS // 4 or KILLS < 100  # few may all miss, on a machine that is busy otherwise
    encoded, _ = run_whole(tmp_path / "images", out, "npz", 0.002)
    assert encoded == len(images) - len(last)
    assert check() == set(range(len(images)))
    left = list(out.glob(".*.tmp"))
    for path in left[1:]:
        os.utime(path, (1, 1))
    run_whole(tmp_path / "images", out, "npz", 0.002)
    assert list(out.glob(".*.tmp")) == left[:1]  # too new to be sure that nobody writes it
    print(f"{KILLS} killed, {partial} of them with a part done, {len(left)} temporary files left behind")


@pytest.mark.slow
def test_the_processes_of_a_launch_share_the_work_and_a_dead_ones_share_is_done_by_the_next_start(tmp_path):
    images = make_images(tmp_path / "images", MANY)
    both = [PrecomputeWorker(tmp_path / "images", tmp_path / "out", rank=rank, processes=2) for rank in range(2)]
    both[1].wait_for("batch")
    both[1].kill()
    done = both[0].result()
    assert (done["encoded"] + done["elsewhere"], done["failed"]) == (len(images), [])
    store = LatentStore(tmp_path / "out")
    there = len(store)
    assert done["encoded"] <= there < len(images)
    again = PrecomputeWorker(tmp_path / "images", tmp_path / "out").result()
    assert (again["current"], again["encoded"]) == (there, len(images) - there)
    store.refresh()
    assert (len(store), store.replaced_rows(), verify(store)) == (len(images), 0, [])


@pytest.mark.weekly
def test_two_runs_started_by_hand_damage_nothing(tmp_path):
    images = make_images(tmp_path / "images", MANY)
    both = [PrecomputeWorker(tmp_path / "images", tmp_path / "out", seconds=0.05) for _ in range(2)]
    for process in both:
        process.wait_for("batch")
    done = [process.result() for process in both]
    assert [one["failed"] for one in done] == [[], []]
    store = LatentStore(tmp_path / "out")
    assert (len(store), verify(store), store.damage) == (len(images), [], [])
    assert store.replaced_rows() == sum(one["encoded"] for one in done) - len(images) > 0


@pytest.mark.weekly
def test_one_that_fails_ends_after_the_others_of_its_launch(tmp_path):
    """torchrun ends all when one exits with an error, so all wait for the last."""
    program = tmp_path / "program.py"
    program.write_text(LAUNCHED, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert sorted(path.name for path in tmp_path.glob("*.done")) == ["1.done", "2.done"], done.stderr


LAUNCHED = """
import pathlib, time
from kohya_bucket.latents.encode.precompute import end_launch, launched
rank, processes = launched()
assert processes == 3
if rank:
    time.sleep(rank)
    pathlib.Path(f"{rank}.done").touch()
end_launch(None)
if rank == 0:
    raise SystemExit(2)
"""


@pytest.mark.long
def test_a_full_disk_keeps_what_is_finished_and_says_what_to_do(tmp_path, small_disk, monkeypatch):
    monkeypatch.setattr(worker, "StoreWriter", partial(StoreWriter, shard_bytes=70_000))
    images = make_images(tmp_path / "images", [(512, 512)] * 30)
    rule = {"area": (512, 512), "min_size": 64, "max_size": 512, "reso_steps": 64}
    output = small_disk / "out"
    settings = {"batch_size": 2, "images_root": tmp_path / "images"}
    with pytest.raises(KohyaBucketError, match="free some space"):
        precompute_latents(dataset_of(images, **rule), MeanEncoder(), output, **settings)
    store = LatentStore(small_disk / "out")
    kept = len(store)
    assert kept > 0
    assert store.damage == []
    assert verify(store) == []
    assert not list((small_disk / "out").rglob(".*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    report = precompute_latents(dataset_of(images, **rule), MeanEncoder(), output, **settings)
    assert (report.current, report.encoded) == (kept, 30 - kept)


def test_a_full_disk_leaves_no_half_npz(tmp_path, small_disk):
    images = make_images(tmp_path / "images", [(512, 512)] * 12)
    dataset = dataset_of(images, area=(512, 512), min_size=64, max_size=512, reso_steps=64)
    with pytest.raises(KohyaBucketError, match="free some space"):
        precompute_latents(dataset, PosteriorStub(), NpzFiles("sd", small_disk))
    arch = ARCHITECTURES["sd"]
    found = list(small_disk.glob("*.npz"))
    assert found
    for path in found:
        read_npz(path, (512, 512), arch)
    assert sorted(small_disk.iterdir()) == sorted(found)


def test_an_error_is_raised_when_nobody_writes_any_more(tmp_path, monkeypatch):
    """Those that are writing end first, and nothing more is begun; here all of a batch had begun before the error."""
    images = make_images(tmp_path / "images", [(64, 64)] * 12)
    given, closing = threading.Event(), threading.Event()
    begun, ended = [], []

    def first_fails(path, *args, **settings):
        begun.append(path)
        if len(begun) == 4:
            given.set()
        assert given.wait(20)
        if path.name.startswith("img_000"):
            raise LatentStoreError("no space")
        assert closing.wait(20)
        write_npz(path, *args, **settings)
        ended.append(path)

    def close(sink):
        closing.set()
        real_close(sink)

    real_close = NpzSink.close
    monkeypatch.setattr(NpzSink, "close", close)
    monkeypatch.setattr("kohya_bucket.trainers.sdscripts.npz.files.write_npz", first_fails)
    with pytest.raises(LatentStoreError, match="no space"):
        precompute_latents(dataset_of(images), PosteriorStub(), NpzFiles("sd", tmp_path / "out"), batch_size=4)
    assert len(begun) < len(images)  # what had not begun is left
    assert len(ended) == len(begun) - 1
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in ended)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kohya-bucket")]


def test_a_read_only_folder_is_said(tmp_path, small_disk):
    images = make_images(tmp_path / "images", SIZES[:2])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(KohyaBucketError, match=r"cannot make the latent store .*[Rr]ead-only"):
        precompute_latents(dataset_of(images), MeanEncoder(), small_disk / "out")
    with pytest.raises(KohyaBucketError, match=r"cannot write .*[Rr]ead-only"):
        precompute_latents(dataset_of(images), PosteriorStub(), NpzFiles("sd", small_disk))


def test_a_store_that_became_read_only_is_read(tmp_path, small_disk):
    images = make_images(tmp_path / "images", SIZES[:4])
    precompute_latents(dataset_of(images), MeanEncoder(), small_disk / "out")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    store = LatentStore(small_disk / "out")
    assert (len(store), verify(store)) == (4, [])


def test_a_full_disk_leaves_a_stale_npz_as_it_is(no_room):
    """Also where the file holds another resolution, which is read and written again."""
    for name in ("sd", "flux"):
        arch = ARCHITECTURES[name]
        old, new = (NpzLatents(np.full(arch.shape((64, 64)), k, np.float32), (64, 64), (0, 0, 64, 64)) for k in (1, 2))
        path = no_room.folder / f"a{arch.suffix}"
        write_npz(path, old, (64, 64), arch)
        before = path.read_bytes()
        with no_room.full(), pytest.raises(KohyaBucketError, match=rf"cannot write .*{path.name}: {no_room.reason}"):
            write_npz(path, new, (64, 64), arch)
        assert path.read_bytes() == before
        write_npz(path, new, (64, 64), arch)
        assert np.array_equal(read_npz(path, (64, 64), arch).latents, new.latents)
    assert len(list(no_room.folder.iterdir())) == 2


@pytest.mark.posix("names of 255 bytes")
def test_a_name_that_is_too_long_for_a_cache_is_known_before_encoding(tmp_path, images) -> None:
    long = images[0].with_name("n" * 240 + images[0].suffix)
    images[0].rename(long)
    encoder, paths = PosteriorStub(), [long, *images[1:]]
    report = precompute_latents(dataset_of(paths), encoder, NpzFiles("sd"), batch_size=4)
    assert [path for path, _ in report.failed] == [str(long)]
    assert "shorten the image's name" in report.failed[0][1]
    assert len(list(long.parent.glob("*.npz"))) == len(paths) - 1
