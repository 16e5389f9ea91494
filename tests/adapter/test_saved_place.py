"""The place in the epoch that a saved state remembers, where it cannot be written."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from kohya_bucket.adapter.state_file import STATE_FILE
from kohya_bucket.planning import EpochPosition
from kohya_bucket.sdscripts.resuming.trainer_resume import TrainerResume


def run_at(batches):
    """A run that has trained so many batches."""
    run = TrainerResume()
    run.accelerator = SimpleNamespace(step=batches)
    run.sampler = SimpleNamespace(
        fingerprint={"images": 200}, position=lambda step: EpochPosition(1, 2).at_step(step, 8)
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
