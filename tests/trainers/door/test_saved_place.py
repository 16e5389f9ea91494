"""The place in the epoch that a saved state remembers: where it cannot be written, and whether it still holds."""

import errno
import json
import re
from types import SimpleNamespace

import pytest

from kohya_bucket.planning import EpochPosition
from kohya_bucket.trainers.door import resume
from kohya_bucket.trainers.door.resume import STATE_FILE, NoPlaceError, ResumeHooks, read_position, write_position
from kohya_bucket.trainers.sdscripts.resuming import TrainerResume
from tests.faults import PASSING, Faults
from tests.trainers.door.test_sampler_positions import sampler_of


def run_at(batches):
    """A run that has trained so many batches."""
    run = TrainerResume()
    run.accelerator = SimpleNamespace(step=batches)
    run.sampler = SimpleNamespace(
        fingerprint={"images": 200},
        planner=SimpleNamespace(focus=None),
        position=lambda step: EpochPosition(1, 2).at_step(step, 8),
    )
    return run


def test_a_full_disk_is_said_in_one_line_and_the_old_state_stays(no_room):
    file = no_room.folder / STATE_FILE
    run_at(3).on_save([], [], str(no_room.folder))
    before = file.read_text(encoding="utf-8")
    assert json.loads(before)["step"] == 3
    with (
        no_room.full(),
        pytest.raises(SystemExit, match=rf"^kohya_bucket: cannot write .*{STATE_FILE}: {no_room.reason}"),
    ):
        run_at(4).on_save([], [], str(no_room.folder))
    assert file.read_text(encoding="utf-8") == before
    assert [path.name for path in no_room.folder.iterdir()] == [STATE_FILE]
    run_at(4).on_save([], [], str(no_room.folder))
    assert json.loads(file.read_text(encoding="utf-8"))["step"] == 4


def test_a_state_goes_on_with_another_batch_size_and_names_what_else_changed(tmp_path):
    sampler = sampler_of({}, 3)
    write_position(tmp_path, EpochPosition(5, 1).at_step(7, 3), sampler.fingerprint)
    assert read_position(tmp_path, sampler_of({}, 4, seed=9).planner, 1).step == 7
    with pytest.raises(NoPlaceError, match=r"was saved \(order was shuffled, now runs; run_length was None, now 8\)$"):
        read_position(tmp_path, sampler_of({"order": "runs"}, 3).planner, 1)
    with pytest.raises(NoPlaceError, match=r"\(max_pixels was None, now 100000\)$"):
        read_position(tmp_path, sampler_of({"max_pixels": 100_000}, 3).planner, 1)


@pytest.mark.parametrize(
    "text", ["", "\x00", "[" * 5000, "NaN", "9" * 5000, '{"format": 1}', "{}", "[]", '{"version": 7}']
)
def test_a_state_that_says_no_place(tmp_path, text):
    (tmp_path / STATE_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(NoPlaceError, match=re.escape(str(tmp_path))):
        read_position(tmp_path, sampler_of({}, 3).planner, 1)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (None, "a", "focus is set, and was not when"),
        ("a", None, "focus is not set, and was when"),
        ("a", "b", "focus changed since"),
        ("a", "a", ""),
        (None, None, ""),
    ],
)
def test_a_focus_that_changed_before_a_resume_is_said(tmp_path, caplog, then, now, said):
    sampler = sampler_of({}, 3)
    write_position(tmp_path, EpochPosition(5, 1).at_step(2, 3), sampler.fingerprint, then)
    sampler.planner.focus = now
    assert read_position(tmp_path, sampler.planner, 1).step == 2
    assert said in caplog.text if said else not caplog.text


def test_a_state_that_does_not_say_its_focus_is_named(tmp_path, caplog):
    sampler = sampler_of({}, 3)
    position = EpochPosition(5, 1).at_step(2, 3)
    (tmp_path / STATE_FILE).write_text(json.dumps(position.state_dict(sampler.fingerprint)), encoding="utf-8")
    sampler.planner.focus = "a"
    assert read_position(tmp_path, sampler.planner, 1).step == 2
    assert "does not say with which focus it was saved" in caplog.text


@pytest.mark.parametrize("rank", [None, "", "0"])
def test_a_run_without_ranks_saves_its_place(tmp_path, monkeypatch, rank):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    run_at(3).on_save([], [], str(tmp_path))
    assert json.loads((tmp_path / STATE_FILE).read_text(encoding="utf-8"))["step"] == 3


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_a_place_that_cannot_be_read_now_ends_the_run(tmp_path, monkeypatch, code):
    sampler = sampler_of({}, 3)
    write_position(tmp_path, EpochPosition(5, 1).at_step(2, 3), sampler.fingerprint)
    run = TrainerResume()
    run.sampler = sampler
    faults = Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(1, 100), code), pytest.raises(SystemExit, match=f"{STATE_FILE}: cannot be read now"):
        run.on_load([], str(tmp_path))


def test_all_processes_go_on_where_the_first_one_reads(tmp_path, monkeypatch):
    """Machines may have folders of their own, of which only the first one's has the file."""
    notes, begun = [], []
    monkeypatch.setattr(resume, "gather", lambda note: [*notes, note])
    for machine in ("first", "second"):
        sampler, run, folder = sampler_of({}, 3), ResumeHooks(), tmp_path / machine
        sampler.world_size, run.sampler = 2, sampler
        folder.mkdir()
        if machine == "first":
            position = sampler.planner.planner(2).position(EpochPosition(5, 1), 4)
            write_position(folder, position, sampler.fingerprint)
        run.on_load([], str(folder))
        notes.append({"place": position})
        begun.append(next(iter(sampler)).position)
    assert begun == [8, 8]
