"""Each piece of work is somebody's, and a dead process' pieces become another's."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.encode.work_claims import WorkBoard
from tests.warm import QUICK

IDS = [f"piece{i}" for i in range(40)]


def claimant(told, folder, claims, finishes):
    """A process that claims so many pieces, finishes so many of them, and works on until it is killed."""
    with WorkBoard(folder) as board:
        claimed = board.claim_each(IDS)
        mine = [next(claimed) for _ in range(claims)]
        for piece in mine[:finishes]:
            board.finish(piece)
        told.send((board.owner, mine))
        time.sleep(600)


class Claimant:
    """Such a process, by now at work on `mine`."""

    def __init__(self, folder, claims, finishes=0):
        receiver, sender = QUICK.Pipe(duplex=False)
        self._process = QUICK.Process(target=claimant, args=(sender, folder, claims, finishes))
        self._process.start()
        owner, self.mine = receiver.recv()
        self._alive = folder / f"{owner}.alive"

    def kill(self):
        self._process.kill()
        self._process.join()

    def die_long_ago(self):
        self.kill()
        os.utime(self._alive, (1, 1))


def test_many_at_once_claim_every_piece_once(tmp_path):
    boards = [WorkBoard(tmp_path / "w") for _ in range(4)]
    taken = [[] for _ in boards]
    # The last one out clears the board, so one that came only then would find all work undone.
    together = threading.Barrier(4)

    def work(k):
        with boards[k]:
            together.wait(30)
            for piece in boards[k].claim_each(IDS):
                taken[k].append(piece)
                boards[k].finish(piece)
            assert boards[k].take_over(IDS) == []

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(piece for pieces in taken for piece in pieces) == sorted(IDS)
    assert not (tmp_path / "w").exists()


def test_what_one_finished_and_left_is_not_claimed_again_by_one_that_comes_late(tmp_path):
    with WorkBoard(tmp_path / "w") as late:
        with WorkBoard(tmp_path / "w") as early:
            for piece in early.claim_each(IDS[:30]):
                early.finish(piece)
        assert list(late.claim_each(IDS)) == IDS[30:]
        for piece in IDS[30:]:
            late.finish(piece)
        assert late.take_over(IDS) == []


def test_pieces_of_the_dead_are_taken_over(tmp_path):
    other = Claimant(tmp_path / "w", claims=5, finishes=1)
    mine = other.mine
    with WorkBoard(tmp_path / "w", poll=0.01) as board:
        rest = list(board.claim_each(IDS))
        # the first was finished before this run began: whether that still counts is for the store to say
        assert sorted([*rest, *mine[1:]]) == sorted(IDS)
        for piece in rest:
            board.finish(piece)
        other.die_long_ago()
        assert sorted(board.take_over(IDS)) == sorted(mine[1:])
        for piece in mine[1:]:
            board.finish(piece)
        assert board.take_over(IDS) == []
    assert not (tmp_path / "w").exists()


def test_one_that_lives_is_waited_for(tmp_path):
    with WorkBoard(tmp_path / "w") as other, WorkBoard(tmp_path / "w", poll=0.01) as board:
        piece = next(other.claim_each(IDS))
        rest = list(board.claim_each(IDS))
        assert piece not in rest
        for done in rest:
            board.finish(done)
        threading.Timer(0.2, other.finish, [piece]).start()
        assert board.take_over(IDS) == []
        assert board.finished_pieces() == set(IDS)


def test_claims_left_by_an_earlier_run_do_not_stop_the_next(tmp_path):
    Claimant(tmp_path / "w", claims=len(IDS), finishes=len(IDS)).die_long_ago()
    with WorkBoard(tmp_path / "w") as board:
        assert list(board.claim_each(IDS)) == IDS


def test_a_process_of_this_machine_that_ended_is_dead_at_once(tmp_path):
    Claimant(tmp_path / "w", claims=1).kill()
    with WorkBoard(tmp_path / "w") as board:
        assert len(list(board.claim_each(IDS))) == (len(IDS) if os.name != "nt" else len(IDS) - 1)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LatentStoreError, match="cannot share work"):
        WorkBoard(tmp_path / "file" / "w")


@pytest.mark.parametrize("links", [True, False])
def test_a_claim_has_its_owners_name_from_the_first_instant(tmp_path, monkeypatch, links):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with WorkBoard(tmp_path / "w") as board, WorkBoard(tmp_path / "w") as other:
        claimed = board.claim_each(IDS)
        piece = next(claimed)
        assert (tmp_path / "w" / f"{piece}.0.claim").read_text(encoding="utf-8") == board.owner
        assert piece not in list(other.claim_each(IDS))
        assert list(claimed) == []
    assert not (tmp_path / "w").exists()


def test_a_claim_whose_answer_got_lost_is_still_ones_own(tmp_path):
    with WorkBoard(tmp_path / "w") as board:
        (tmp_path / "w" / f"{IDS[0]}.0.claim").write_text(board.owner, encoding="utf-8")
        assert list(board.claim_each(IDS)) == IDS


def test_the_last_to_leave_clears_nothing_of_one_that_comes_at_that_instant(tmp_path, monkeypatch):
    last = WorkBoard(tmp_path / "w").__enter__()
    for piece in last.claim_each(IDS[:5]):
        last.finish(piece)
    newcomers = []

    def alone():
        newcomers.append(WorkBoard(tmp_path / "w").__enter__())
        assert list(newcomers[0].claim_each(IDS)) == IDS
        return set()

    monkeypatch.setattr(last.signs, "living", alone)
    last.__exit__(None, None, None)
    newcomer = newcomers[0]
    assert (tmp_path / "w" / f"{newcomer.owner}.alive").exists()
    with WorkBoard(tmp_path / "w") as third:
        assert list(third.claim_each(IDS)) == []
    newcomer.__exit__(None, None, None)
    assert not (tmp_path / "w").exists()


def test_one_that_comes_while_the_folder_is_cleared_away_makes_it_again(tmp_path, monkeypatch):
    real = os.replace

    def cleared(*paths):
        monkeypatch.setattr(os, "replace", real)
        shutil.rmtree(tmp_path / "w")
        return real(*paths)

    monkeypatch.setattr(os, "replace", cleared)
    with WorkBoard(tmp_path / "w") as board:
        assert list(board.claim_each(IDS)) == IDS
    assert not (tmp_path / "w").exists()


def test_one_that_slept_until_it_was_taken_for_dead_goes_on(tmp_path):
    with WorkBoard(tmp_path / "w") as board:
        claimed = board.claim_each(IDS)
        first = next(claimed)
        shutil.rmtree(tmp_path / "w")
        assert [first, *claimed] == IDS
        with WorkBoard(tmp_path / "w") as other:
            assert list(other.claim_each(IDS[1:])) == []
    assert not (tmp_path / "w").exists()


def test_a_board_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    real = Path.write_text

    def full(path, *args, **settings):
        if path.suffix == ".name":
            real(path, "")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args, **settings)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(LatentStoreError, match=r"cannot share work .*No space left"):
        WorkBoard(tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_files_of_others_stay(tmp_path):
    folder = tmp_path / "w"
    folder.mkdir()
    names = ["model.safetensors", "x.claim", "a.b.claim", "notes.done", "me.alive", "it is.0.claim", ".hidden"]
    for name in names:
        (folder / name).write_text(name, encoding="utf-8")
    with WorkBoard(folder) as board:
        for piece in board.claim_each(IDS):
            board.finish(piece)
        assert board.take_over(IDS) == []
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == {name: name for name in names}
