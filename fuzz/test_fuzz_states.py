"""Saved positions: resumed from, or refused with one clear error; a plan never starts outside of its epoch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.mutations import mutated, read_or_refused
from fuzz.test_fuzz_texts import values
from kohya_bucket.planning import EpochPosition
from kohya_bucket.planning.planner import EpochPlanner
from kohya_bucket.trainers.door.resume import STATE_FILE, NoPlaceError, read_position
from tests.trainers.door.test_sampler_positions import sampler_of

PLANNER = EpochPlanner(np.arange(50) % 4, 2, world_size=2, repeats=1.5)
STATE = json.loads(json.dumps(EpochPosition(7, 3).at_step(5, 4).state_dict(PLANNER.fingerprint)))


def resume(state: object) -> None:
    position = read_or_refused(EpochPosition.from_state_dict, state, PLANNER.fingerprint)
    if position is not None:
        read_or_refused(PLANNER.plan, position.seed, position.epoch, position.done)


@given(st.dictionaries(st.sampled_from(sorted(STATE)), values, max_size=3))
def test_values(changes: dict) -> None:
    resume({**STATE, **changes})


@given(st.lists(st.lists(values, max_size=3), max_size=3))
def test_parts(done: list) -> None:
    resume({**STATE, "done": done})


@given(st.dictionaries(st.sampled_from(sorted(STATE["fingerprint"])), values, max_size=3))
def test_fingerprints(changes: dict) -> None:
    resume({**STATE, "fingerprint": {**STATE["fingerprint"], **changes}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


SAMPLER = sampler_of({}, 3)
WHOLE = json.dumps(EpochPosition(5, 1).at_step(7, 3).state_dict(SAMPLER.fingerprint)).encode()


@given(mutated(WHOLE))
def test_state_files(folder: Path, data: bytes) -> None:
    (folder / STATE_FILE).write_bytes(data)
    position = read_or_refused(read_position, folder, SAMPLER.planner, 1, error=NoPlaceError)
    assert position is None or (position.epoch >= 0 and position.step >= 0)
