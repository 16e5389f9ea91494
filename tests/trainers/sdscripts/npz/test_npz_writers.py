"""Writers of npz: whoever writes at the same time loses nothing, and what is not ours stays as it is."""

import io
import multiprocessing
import os
import random
import stat
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket import files
from kohya_bucket.errors import LatentStoreError, UnreadableError
from kohya_bucket.files import remove_leftovers, update_file
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz import read_write as npz
from kohya_bucket.trainers.sdscripts.npz.read_write import TEXT_ARRAYS, write_arrays
from tests.faults import PASSING, Faults
from tests.thinned import one_in

FLUX, SD = ARCHITECTURES["flux"], ARCHITECTURES["sd"]


def made(number, arch=FLUX):
    """Latents of a size of their own."""
    bucket = (16 + 16 * number, 32)
    latents = np.full(arch.shape(bucket), float(number), np.float32)
    return bucket, npz.NpzLatents(latents, (64, 64), (0.0, 0.0, 64.0, 64.0))


def put(path, number, arch=FLUX):
    bucket, item = made(number, arch)
    npz.write_npz(path, item, bucket, arch, sync=False)


def holds(path, number, arch=FLUX):
    bucket, item = made(number, arch)
    return np.array_equal(npz.read_npz(path, bucket, arch).latents, item.latents)


def writer(folder, number, names, together):
    for name in names:
        together.wait(60)
        put(folder / name, number)


@pytest.mark.slow
def test_processes_that_write_the_same_files_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(3)
    names = [f"{k}_0064x0064_flux.npz" for k in range(60)]
    processes = [context.Process(target=writer, args=(tmp_path, number, names, together)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert [name for name in names for number in range(3) if not holds(tmp_path / name, number)] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


class Stopped(BaseException):
    """A writer that ends where it is, as when it is killed."""


@pytest.mark.long
@pytest.mark.parametrize("seed", one_in(4, range(8)))
def test_any_order_of_steps_loses_nothing(tmp_path, monkeypatch, seed):
    """Three writers make their steps (read, write, lock, look, rename, unlock) in random order; some are killed, some
    sleep longer than others wait."""
    rng = random.Random(seed)
    path = tmp_path / "a_0064x0064_flux.npz"
    if rng.random() < 0.7:
        put(path, 9)
    monkeypatch.setattr(files, "_HELD_SECONDS", 0.05)
    chance = threading.Lock()

    def maybe():
        with chance:
            what = rng.random()
        if what < 0.03 and threading.current_thread() is not threading.main_thread():
            raise Stopped
        if what < 0.5:
            threading.Event().wait(0.3 if what < 0.08 else rng.random() * 0.01)

    def step(call):
        def stepped(*args, **more):
            maybe()
            return call(*args, **more)

        return stepped

    for name in ("_content", "_rename_over", "_is_made"):
        monkeypatch.setattr(files, name, step(getattr(files, name)))
    for name in ("rename", "listdir"):
        monkeypatch.setattr(os, name, step(getattr(os, name)))
    release, done = files._release, []

    def release_slowly(lock, names):
        if not isinstance(sys.exc_info()[1], Stopped):  # a writer that is killed removes nothing
            maybe()
            release(lock, names)

    monkeypatch.setattr(files, "_release", release_slowly)

    def work(number):
        for turn in range(3):
            try:
                put(path, number + 3 * turn)
            except Stopped:
                continue
            done.append(number + 3 * turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [number for number in done if not holds(path, number)] == []


def test_what_a_dead_writer_left_holds_nobody_up_and_is_removed(tmp_path, monkeypatch):
    path = tmp_path / "a_0064x0064_flux.npz"
    put(path, 1)
    monkeypatch.setattr(files, "_HELD_SECONDS", 0.2)
    temporary = files._sibling(path, "1" * 12)
    temporary.write_bytes(b"half")
    lock = files._sibling(path, files._LOCK)
    lock.mkdir()
    temporary.rename(lock / temporary.name)  # and is killed here
    put(path, 2)
    assert holds(path, 1)
    assert holds(path, 2)
    assert list(tmp_path.iterdir()) == [path]
    lock.mkdir()
    for left in (temporary, lock / temporary.name):
        left.write_bytes(b"half")
    for left in (temporary, lock):
        os.utime(left, (1, 1))
    assert remove_leftovers([path]) == 2
    assert list(tmp_path.iterdir()) == [path]


def foreign_file(rng):
    """A user's npz: members that are none of ours, in every way that a zip may have them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.comment = b"mine"
        for k in range(rng.randrange(1, 6)):
            how = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
            what = io.BytesIO()
            np.save(what, np.array([{"a": k}, None], dtype=object), allow_pickle=True)
            name = rng.choice(["pose", "a.txt", "ä/b", "latents_of_mine", "latents"[: rng.randrange(3, 7)]])
            data = rng.choice([what.getvalue(), rng.randbytes(rng.randrange(5000)), b""])
            file.writestr(f"{name}{k}.{rng.choice(['npy', 'bin'])}", data, how)
    data = bytearray(out.getvalue())
    if rng.random() < 0.3:  # encrypted, or so it says
        at = data.index(b"PK\1\2")
        data[at + 8] |= 1
    return bytes(data)


def raw_members(data):
    """Each member as it lies in a file, and what the directory says of it."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        out = {}
        for info in file.infolist():
            begin = (
                info.header_offset
                + 30
                + sum(int.from_bytes(data[info.header_offset + k :][:2], "little") for k in (26, 28))
            )
            raw = data[begin : begin + info.compress_size]
            out[info.filename] = raw, info.CRC, info.file_size, info.compress_type, info.flag_bits & 1
        return out


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_what_is_not_ours_stays_byte_for_byte(tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "a.npz"
    theirs = foreign_file(rng)
    path.write_bytes(theirs)
    arch = rng.choice([FLUX, SD, SD.read_by("0.10.1")])
    put(path, 3, arch)
    put(path, 3, arch)
    npz.place_text_npz(path, {"t5_out": np.ones(3, np.float32)}, npz.text_marks("a cat"))
    with np.load(path) as outputs:
        assert np.array_equal(outputs["t5_out"], np.ones(3))
        assert outputs[npz.CAPTION_KEY].tobytes() == b"a cat"
    assert holds(path, 3, arch)
    after = raw_members(path.read_bytes())
    assert {name: after.get(name) for name in raw_members(theirs)} == raw_members(theirs)
    with zipfile.ZipFile(path) as file:
        assert file.comment == b"mine"


@pytest.mark.parametrize("content", [b"my notes", b"PK\3\4 a zip that is cut off", b"\x89PNG\r\n\x1a\n" + bytes(99)])
def test_a_file_that_is_no_npz_is_refused_by_name(tmp_path, content):
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    for write in (lambda: put(path, 1), lambda: write_arrays(path, {"pool2": np.zeros(3, np.float32)})):
        with pytest.raises(LatentStoreError, match=r"a\.npz is left as it is: it is not an npz"):
            write()
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("left", [b"", bytes(4096), "cut"])
def test_what_is_left_of_a_cache_is_replaced(tmp_path, left):
    path = tmp_path / "a_0064x0064_flux.npz"
    put(path, 1)
    path.write_bytes(path.read_bytes()[:700] if left == "cut" else left)
    put(path, 2)
    assert holds(path, 2)


def test_outputs_of_another_caption_leave_none_behind(tmp_path):
    path = tmp_path / "a_sd3_te.npz"
    np.savez(path, **{name: np.zeros(1) for name in TEXT_ARRAYS}, mine=np.ones(2))
    npz.place_text_npz(path, {"lg_out": np.zeros(3, np.float32)}, npz.text_marks("a cat"))
    with np.load(path) as file:
        assert sorted(file) == [npz.CAPTION_KEY, "lg_out", "mine"]


@pytest.mark.posix("links and permissions of another kind")
def test_a_link_stays_one_and_permissions_stay(tmp_path):
    real, link = tmp_path / "elsewhere" / "a.npz", tmp_path / "a_0064x0064_flux.npz"
    real.parent.mkdir()
    put(real, 1)
    real.chmod(0o600)
    link.symlink_to(real)
    put(link, 2)
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert holds(real, 1)
    assert holds(link, 2)


@pytest.mark.parametrize("seed", range(30))
def test_a_file_that_cannot_be_read_now_is_not_replaced(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    path = tmp_path / "a_0064x0064_flux.npz"
    put(path, 1)
    before = path.read_bytes()
    faults = Faults(path)
    faults.install(monkeypatch)
    with faults.at(range(0), 0):
        put(tmp_path / "b_0064x0064_flux.npz", 2)
        npz.text_stale_reasons(path)
    first = rng.randrange(1, 6)
    with faults.at(range(first, first + rng.choice([1, 10**9])), rng.choice(PASSING)):
        try:
            put(path, 2)
        except (UnreadableError, LatentStoreError) as error:
            assert path.name in str(error)  # noqa: PT017
    failed = bool(faults.failed)
    assert holds(path, 1)
    assert path.read_bytes() == before or holds(path, 2)
    assert failed or holds(path, 2)
    with faults.at(range(first, 10**9), PASSING[0]):
        try:
            assert npz.text_stale_reasons(path) == []
        except UnreadableError as error:
            assert path.name in str(error)  # noqa: PT017


def test_a_file_that_is_updated_by_what_nobody_may_write_says_where_else(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "_rename_over", refuse)
    with pytest.raises(LatentStoreError, match="keep latents elsewhere"):
        put(Path(tmp_path / "a.npz"), 1)
    with pytest.raises(LatentStoreError, match="choose another folder"):
        update_file(tmp_path / "b", lambda _: b"x")


@pytest.mark.parametrize("seed", range(8))
def test_outputs_are_written_as_numpy_writes_them(tmp_path, seed):
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((3, 4, 6)).astype(rng.choice(["f2", "f4", "f8", "i8", ">f4"]))
    arrays = {"a": whole, "turned": whole.T, "part": whole[:, 1:3], "empty": whole[:0], "flag": np.array(seed % 2 == 0)}
    marks = npz.text_marks("a cat")
    np.savez(tmp_path / "numpys.npz", **arrays, **marks)
    npz.place_text_npz(tmp_path / "ours.npz", arrays, marks)
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "numpys.npz").read_bytes()
