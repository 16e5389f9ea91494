"""The law of `fix`: after `--undo` everything is as before, or it is named and the rest is done; and outside the folder
nothing is ever written, moved or deleted, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from multiprocessing import SimpleQueue, get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import mend_log, mending
from kohya_bucket.images.formats import CAPTION_EXTENSIONS, IMAGE_EXTENSIONS
from kohya_bucket.images.mending import Mend
from kohya_bucket.images.stamps import hash_file
from tests.images import mending_worlds as worlds
from tests.images.mending_worlds import Calls, Dead

MANY = int(os.environ.get("KOHYA_BUCKET_SEEDS", "2000"))


class World:
    """A random folder, what is expected to be in it after undoing, and the names of what was said to be otherwise."""

    def __init__(self, base: Path, seed: int, *, posix: bool) -> None:
        self.base, self.data, self.draw = base, base / "data", random.Random(seed)
        worlds.fill(base, self.draw, odd=posix, links=posix)
        self.expected, self.named = worlds.seen(base), set[str]()
        self.look = mending.find(str(self.data))

    def calls(self) -> Calls:
        return Calls(self.data.resolve())

    def name(self, outcome: mend_log.Outcome) -> mend_log.Outcome:
        self.named |= {os.path.relpath(path, self.base) for path, _ in outcome.failed}
        return outcome

    def apply(self) -> None:
        self.name(mend_log.apply(str(self.data), self.look.fixes, "cp1252"))

    def undo(self) -> None:
        with refused("no run to undo"):  # where it was killed or refused before anything was changed
            self.name(mend_log.undo(str(self.data)))

    def check_outside(self, calls: Calls) -> None:
        assert not calls.strayed
        before, now = (
            {name: what[:4] for name, what in there.items() if Path(name).parts[0] != "data"}  # links may lead inside
            for there in (self.expected, worlds.seen(self.base))
        )
        assert now == before

    def differs(self) -> set[str]:
        """What is not as it was and is not named, but for the place of what was set aside."""
        now, expected = (worlds.without_aside(all_, self.named) for all_ in (worlds.seen(self.base), self.expected))
        return {name for name in now.keys() | expected.keys() if now.get(name) != expected.get(name)}

    def meddle(self) -> None:
        """What another program, or a person, does to a file of the folder."""
        files = [path for path in sorted(self.data.rglob("*")) if _is_plain(path) and ".set-aside" not in path.parts]
        path, before = self.draw.choice(files), worlds.seen(self.base)
        kind = self.draw.randrange(5)
        if kind == 0:
            path.unlink()
        elif kind == 1:  # written in place, as by a copy that goes on
            path.chmod(0o644)
            with open(path, "ab") as file:
                file.write(self.draw.choice(list(worlds.pictures().values())))
        elif kind == 2:
            path.unlink()
            path.write_bytes(self.draw.choice(list(worlds.pictures().values())))
        elif kind == 3:
            path.unlink()
            path.symlink_to(self.draw.choice([self.base / "pool", path.parent, "../pool/a.jpg", __file__]))
        else:
            made = [fix.becomes for fix in self.look.fixes if fix.becomes and not os.path.lexists(fix.becomes)]
            if not made:
                return
            path = Path(self.draw.choice(made))
            path.write_bytes(b"another's")
        now = worlds.seen(self.base)
        if kind == 1:  # also the hard links of it that are set aside
            changed = {entry[-1]: entry for name, entry in now.items() if before.get(name) != entry}
            self.expected |= {name: changed[e[-1]] for name, e in self.expected.items() if e[-1] in changed}
        for name in before.keys() | now.keys():  # several for hard links
            if before.get(name) == now.get(name) or worlds.is_aside(name):
                continue
            if name in now:
                self.expected[name] = now[name]
            elif before[name][:4] == self.expected.get(name, ())[:4]:  # or else it was made, and what it was comes back
                del self.expected[name]


@contextmanager
def refused(why: str) -> Iterator[None]:
    """What is done here may be refused, for that reason."""
    try:
        yield
    except KohyaBucketError as error:
        if why not in str(error):
            raise


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


@cache
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def killed(world: World, what: Callable[[], Any], at: int, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Do it in a process that dies before its call number `at`."""
    calls = world.calls()
    calls.at, calls.event = at, calls.die
    with monkeypatch.context() as patched, calls.counted():
        patched.setattr(os, "getpid", dead_pid)
        try:
            what()
        except Dead:
            assert calls.dead
    for log in world.data.rglob("log.jsonl"):  # of a line that was being written
        if calls.dead and world.draw.random() < 0.5:
            log.write_bytes(log.read_bytes() + b'{"path": "tur')
    return calls


def run_case(base: Path, seed: int, kind: str, monkeypatch: pytest.MonkeyPatch, *, posix: bool = True) -> None:
    world = World(base, seed, posix=posix)
    at = world.draw.randrange(1, 9 * len(world.look.fixes) + 12)
    calls = world.calls()
    if kind == "whole":
        with calls.counted():
            world.apply()
        assert not world.named
        left = {path for path, _ in world.look.left}
        for fix in mending.find(str(world.data)).fixes:  # a name became free, or two were made the same
            assert fix.path in left or fix.mends[0] in (Mend.COPY, Mend.ALONG)
        now = worlds.seen(world.base)
        for fix in world.look.fixes:
            if fix.becomes:  # rights and owners stay
                old, new = (os.path.relpath(path, base) for path in (fix.path, fix.becomes))
                assert now[new][3] == world.expected[old][3]
        aside = [path for path in world.data.rglob("*") if ".set-aside" in path.parts]
        assert not {path.suffix.lower() for path in aside} & {*IMAGE_EXTENSIONS, *CAPTION_EXTENSIONS}
    elif kind == "killed":
        calls = killed(world, world.apply, at, monkeypatch)
    elif kind == "fault":
        calls.at, calls.event = at, calls.fail
        with monkeypatch.context() as patched, calls.counted():
            patched.setattr(os, "getpid", dead_pid)
            with refused("cannot be written"):
                world.apply()
    elif kind == "meddled":
        if world.draw.random() < 0.5:
            world.meddle()
        calls.at, calls.event = at, world.meddle
        with calls.counted():
            world.apply()
    elif kind == "two":

        def other() -> None:
            with refused("another run is at work"):
                world.draw.choice([world.apply, world.undo])()

        calls.at, calls.event = at, other
        with calls.counted(), refused("another run is at work"):
            world.apply()
    world.check_outside(calls)
    again = world.draw.choice(["", "killed", "killed", "meddled"]) if kind != "whole" else ""
    if again == "killed":
        world.check_outside(killed(world, world.undo, world.draw.randrange(1, 30), monkeypatch))
    elif again == "meddled" and kind == "meddled":
        world.meddle()
    calls = world.calls()
    with calls.counted():
        world.undo()
        world.undo()  # of two runs, or of one whose undoing was killed
    world.check_outside(calls)
    assert not world.differs(), (seed, kind, at, again)
    if kind in ("whole", "killed"):
        assert not world.named
        assert not list(world.data.rglob(".set-aside"))


KINDS = ["whole", "killed", "fault", "meddled", "two"]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_files_come_back(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_case(tmp_path, 1, kind, monkeypatch, posix=False)


@pytest.mark.posix("odd names, owners, and links that anybody may make")
@pytest.mark.parametrize("kind", KINDS)
def test_all_comes_back(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_case(tmp_path, 0, kind, monkeypatch)


@pytest.mark.long
@pytest.mark.posix("odd names, owners, and links that anybody may make")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(1, 11))
def test_all_comes_back_of_more_folders(tmp_path: Path, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_case(tmp_path, seed, kind, monkeypatch)


@pytest.mark.weekly
@pytest.mark.posix("odd names, owners, and links that anybody may make")
@pytest.mark.parametrize("kind", KINDS)
def test_all_comes_back_of_thousands(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100, 100 + MANY):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run_case(folder, seed, kind, monkeypatch)


@pytest.mark.long
@pytest.mark.posix("mounts")
@pytest.mark.skipif(not worlds.can_mount(), reason="only root on Linux can mount a tmpfs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["data", "data/sub"])
@pytest.mark.parametrize("seed", range(4))
def test_all_comes_back_on_other_disks(
    tmp_path: Path, kind: str, where: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / where).mkdir(parents=True)
    with ExitStack() as stack:
        stack.enter_context(worlds.mounted(tmp_path / where))
        run_case(tmp_path, seed, kind, monkeypatch)


HEAD = json.dumps({"made_by": "made by kohya_bucket: fix"})


def strange_line(draw: random.Random, base: Path, names: list[str]) -> bytes:
    """A line of a log that nobody's `fix` wrote."""
    paths = [
        *names, "../pool/new.txt", "../pool/a.png", str(base / "pool" / "a.png"), "a/../../pool/a.png", "/etc/x", "",
        ".", "..", "out/new.png", "out/a.png", "sub", "C:/x", "C:x", "..\\x", "a\0b", "x" * 300,
        ".set-aside/1/log.jsonl",
        ".Set-Aside/lock", "./a.png", "a//b", "\ud800.png", "sub/new.png",
    ]  # fmt: skip
    files = [base / "data" / name for name in names]
    hashes = ["", "", "0" * 32, *(hash_file(str(path)) for path in files if path.is_file())]
    line: Any = {
        "path": draw.choice(paths), "becomes": draw.choice(["", *paths]), "made": draw.choice(hashes),
        "moved": draw.choice(hashes),
    }  # fmt: skip
    kind = draw.randrange(8)
    if kind == 0:
        line[draw.choice(list(line))] = draw.choice([None, 7, [], {}, True])
    elif kind == 1:
        del line[draw.choice(list(line))]
    elif kind == 2:
        line["more"] = ""
    raw = json.dumps(line).encode()
    if kind == 3:
        return draw.choice([b"\xff\xfe{}", b"[" * 50_000, b"null", b"7", b"{", b"", b'{"path": ' * 2000, b"\0" * 40])
    return raw


@pytest.mark.posix("links that anybody may make")
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 150))])
def test_the_log_of_a_stranger_leads_nowhere(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    worlds.fill(tmp_path, draw, odd=True, links=True)
    data, pool = tmp_path / "data", tmp_path / "pool"
    (data / "out").symlink_to(pool)
    names = [os.path.relpath(path, data) for path in sorted(data.rglob("*")) if path.is_file()]
    place = data / ".set-aside"
    if draw.random() < 0.1:
        place.symlink_to(pool)
    for run in "1", "2":
        (place / run).mkdir(parents=True)
        lines = [strange_line(draw, tmp_path, names) for _ in range(6)]
        head = draw.choice([HEAD] * 8 + ["{}", "[", "", "\0", '{"made_by": 3}']).encode()
        (place / run / "log.jsonl").write_bytes(b"\n".join([head, *lines, b""]))
        for number, line in enumerate(lines, 1):
            try:
                name = Path(json.loads(line)["path"]).name[-60:]
                for kept in (f"{number}-{name}.aside", f"{number}.gone.aside", f"{number}.new.aside"):
                    if draw.random() < 0.5:
                        (place / run / kept).write_bytes(b"planted")
                    elif draw.random() < 0.3:
                        (place / run / kept).symlink_to(draw.choice([pool / "new.png", pool, __file__]))
            except (ValueError, TypeError, KeyError, OSError, RecursionError):
                pass
    outside = {name: what for name, what in worlds.seen(tmp_path).items() if Path(name).parts[0] != "data"}
    held = {what[1] for name, what in worlds.seen(data).items() if what[0] == "file" and not worlds.is_aside(name)}
    calls = Calls(data.resolve())
    for _ in range(3):
        with calls.counted(), refused(""):
            mend_log.undo(str(data))
    assert not calls.strayed
    assert {name: what for name, what in worlds.seen(tmp_path).items() if Path(name).parts[0] != "data"} == outside
    if not place.is_symlink():  # but for what a line called its own
        now = {what[1] for what in worlds.seen(data).values() if what[0] == "file"}
        assert held <= now


def test_a_run_that_cannot_be_undone_blocks_no_other(tmp_path: Path) -> None:
    worlds.fill(tmp_path, random.Random(5), odd=False, links=False)
    data = tmp_path / "data"
    (data / "later.gif").write_bytes(worlds.pictures()["moves.gif"][:-1] + b";")
    before = worlds.without_aside(worlds.seen(tmp_path))
    (data / "later.gif").rename(tmp_path / "later.gif")
    mend_log.apply(str(data), mending.find(str(data)).fixes, "cp1252")
    (tmp_path / "later.gif").rename(data / "later.gif")
    later = [fix for fix in mending.find(str(data)).fixes if Path(fix.path).name == "later.gif"]
    assert mend_log.apply(str(data), later, "cp1252").done == 1
    (data / "later.png").write_bytes(b"a person's")
    outcome = mend_log.undo(str(data))
    assert [Path(path).name for path, _ in outcome.failed] == ["later.gif"]
    assert outcome.done > 1
    (data / "later.png").unlink()
    assert not mend_log.undo(str(data)).failed
    assert worlds.without_aside(worlds.seen(tmp_path)) == before


def _leave_a_lock(place: Path, gone: int) -> None:
    place.mkdir(exist_ok=True)
    (place / f"claim-{gone}-{mend_log._machine()}-0").touch()


def _take_it_over(place: Path, begin: Barrier, end: Barrier, entered: SimpleQueue[int]) -> None:
    draw, judge = random.Random(os.getpid()), mend_log._is_removed

    def judge_slowly(claim: Path) -> bool:
        time.sleep(draw.random() / 50)
        return judge(claim)

    mend_log._is_removed = judge_slowly
    for number in range(15):
        begin.wait(60)
        with suppress(KohyaBucketError), mend_log._locked(place):
            inside = place / f"inside{number}"
            inside.open("x").close()
            time.sleep(0.02)
            inside.unlink()
            entered.put(number)
        end.wait(60)


def test_what_ends_a_run_is_what_is_raised(tmp_path: Path) -> None:
    """Whatever it is: also an error that making a claim may raise."""
    place = tmp_path / ".set-aside"
    for error in (FileNotFoundError("gone"), FileExistsError("there"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, mend_log._locked(place):
            raise error
        assert raised.value is error
        assert not place.exists()


@pytest.mark.slow
def test_one_process_takes_over_what_a_process_that_is_gone_held(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    spawn, place = get_context("spawn"), tmp_path / ".set-aside"
    begin, end = spawn.Barrier(3, partial(_leave_a_lock, place, gone.pid)), spawn.Barrier(3)
    entered = spawn.SimpleQueue()
    takers = [spawn.Process(target=_take_it_over, args=(place, begin, end, entered)) for _ in range(3)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert [taker.exitcode for taker in takers] == [0, 0, 0]
    numbers = []
    while not entered.empty():
        numbers.append(entered.get())
    assert len(set(numbers)) > 10  # in a round, all may have met
    assert not place.exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_processes_that_are_killed_or_meet_lose_nothing(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    worlds.fill(tmp_path, draw, odd=False, links=os.name != "nt")
    data = tmp_path / "data"
    for k in range(60):
        (data / f"m{k}.gif").write_bytes(worlds.pictures()["moves.gif"] + bytes([k]))
    before = worlds.without_aside(worlds.seen(tmp_path))
    command = [sys.executable, "-m", "kohya_bucket", "fix", "--quiet", str(data)]
    runs = [subprocess.Popen([*command, "--apply"], stderr=subprocess.DEVNULL) for _ in range(1 + seed % 2)]
    wanted = draw.randrange(1, 60)
    while all(run.poll() is None for run in runs):
        if any(log.read_bytes().count(b"\n") > wanted for log in data.glob(".set-aside/*/log.jsonl")):
            runs[0].kill()
    for run in runs:
        run.wait()
    for _ in range(3):  # of both runs; the last has nothing to do
        last = subprocess.run([*command, "--undo"], capture_output=True, text=True, encoding="utf-8")
    assert "no run to undo" in last.stderr
    assert worlds.without_aside(worlds.seen(tmp_path)) == before
