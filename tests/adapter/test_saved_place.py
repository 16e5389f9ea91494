"""The place in the epoch that a saved state remembers: where it cannot be written, and whether it still holds."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from kohya_bucket.adapter.resume import STATE_FILE, NoPlaceError, read_position, write_position
from kohya_bucket.planning import EpochPosition
from kohya_bucket.planning.resume import TrainedPart
from kohya_bucket.sdscripts.resuming import TrainerResume
from tests.adapter.test_sampler_positions import sampler_of


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


# Written by the version before states had fingerprints, for the samplers below, after seven batches.
BEFORE_FINGERPRINTS = {
    "0253cd71591ce1f262f38a20957c7a7ad87d7dee6a27429dcf8eb718a122a38e": ({}, [[51, 17], [25]]),
    "4efc755de3af784f5efb86644103def39978de0efce45fe5b0967b7c043cf54c": (
        {"remainder": "merge", "merge_max_crop": 0.5, "order": "runs"},
        [[19, 21, 45], [4, 40, 58]],
    ),
}


@pytest.mark.parametrize("digest", BEFORE_FINGERPRINTS)
def test_states_from_before_fingerprints_are_read(tmp_path, digest):
    table, following = BEFORE_FINGERPRINTS[digest]
    part = {"seed": 5, "epoch": 1, "global_batch": [3] * 6, "steps": 7}
    state = {"format": 1, "images": digest, "count": 60, "trained": [part]}
    (tmp_path / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
    sampler = sampler_of(table, 3, seed=99)
    position = read_position(tmp_path, sampler.planner, 1)
    assert position == EpochPosition(5, 1, (TrainedPart(3, 7),))
    sampler.resume(position)
    assert [batch.images.tolist() for batch in sampler][:2] == following
    with pytest.raises(NoPlaceError, match=r"options changed since .* was saved \(60 images then, 60 now\)"):
        read_position(tmp_path, sampler_of({"order": "sorted"}, 3).planner, 1)


def test_a_state_goes_on_with_another_batch_size_and_names_what_else_changed(tmp_path):
    sampler = sampler_of({}, 3)
    write_position(tmp_path, EpochPosition(5, 1).at_step(7, 3), sampler.fingerprint)
    assert read_position(tmp_path, sampler_of({}, 4, seed=9).planner, 1).step == 7
    with pytest.raises(NoPlaceError, match=r"was saved \(order was shuffled, now runs; run_length was None, now 8\)$"):
        read_position(tmp_path, sampler_of({"order": "runs"}, 3).planner, 1)
    with pytest.raises(NoPlaceError, match=r"\(max_pixels was None, now 100000\)$"):
        read_position(tmp_path, sampler_of({"max_pixels": 100_000}, 3).planner, 1)


DIGEST = next(iter(BEFORE_FINGERPRINTS))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00",
        "[" * 5000,
        "NaN",
        "9" * 5000,
        '{"format": 1}',
        "{}",
        "[]",
        f'{{"format": 1, "images": "{DIGEST}"}}',
        f'{{"format": 1, "images": "{DIGEST}", "trained": []}}',
        f'{{"format": 1, "images": "{DIGEST}", "trained": [{{"seed": 1, "epoch": -1, "global_batch": 3, "steps": 1}}'
        "]}",
        '{"version": 7}',
        '{"format": 9, "images": "", "count": 1}',
    ],
)
def test_a_state_that_says_no_place(tmp_path, text):
    (tmp_path / STATE_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(NoPlaceError, match=re.escape(str(tmp_path))):
        read_position(tmp_path, sampler_of({}, 3).planner, 1)
