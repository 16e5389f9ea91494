"""What the log says of an epoch, once it is trained."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_sampler_positions import IMAGES, sampler_of

from kohya_bucket.trainers.door.resume import ResumeHooks


@pytest.fixture
def run(caplog):
    """(the sampler of a run, its accelerator, what the log says)."""
    caplog.set_level(logging.INFO, logger="kohya_bucket")
    hooks, sampler = ResumeHooks(), sampler_of({}, 4)
    hooks.accelerator = SimpleNamespace(step=0)
    hooks.attach(sampler)
    yield sampler, hooks, lambda: [record.getMessage() for record in caplog.records]
    hooks.sampler = None


def test_an_epoch_is_counted_when_the_next_one_begins(run):
    sampler, hooks, said = run
    batches = len(list(sampler))
    hooks.accelerator.step = 0  # as accelerate has it when an epoch ends
    assert said() == []
    sampler.current_epoch.value = 2
    second = iter(sampler)
    next(second)
    assert said() == [f"epoch 1: {IMAGES} images, 0 missed, 0 repeated"]
    hooks.accelerator.step = 1
    hooks._say_what_was_trained()
    assert said()[1:] == [f"epoch 2 ended after 1 of {batches} batches"]
    hooks._say_what_was_trained()
    assert len(said()) == 2


def test_unreadable_images_are_counted(run):
    sampler, hooks, said = run
    for number, _ in enumerate(sampler):
        if number < 2:
            sampler.bad_images.note(0, 7, replaced=number == 0)
    hooks._say_what_was_trained()
    images = f"epoch 1: {IMAGES} images"
    assert said() == [f"{images}, 2 missed (2 unreadable), 1 repeated (1 instead of unreadable ones)"]


def test_a_run_that_fails_before_its_first_batch_has_trained_nothing(run, monkeypatch):
    sampler, hooks, said = run
    list(sampler)  # read ahead
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    hooks._say_what_was_trained()
    assert said() == []


@pytest.mark.slow
def test_the_last_epoch_is_told_at_the_end_of_the_program():
    program = """
import logging, types
logging.basicConfig(level="INFO")
from test_sampler_positions import sampler_of
from kohya_bucket.trainers.door.resume import ResumeHooks
hooks, sampler = ResumeHooks(), sampler_of({}, 4)
hooks.accelerator = types.SimpleNamespace(step=0)
hooks.attach(sampler)
list(sampler)
print("trained")
"""
    folder = [str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folder!r}\n{program}"],
        capture_output=True, text=True, encoding="utf-8", check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "trained"
    assert f"epoch 1: {IMAGES} images, 0 missed, 0 repeated" in done.stderr
