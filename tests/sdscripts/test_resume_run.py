"""A run that saves, stops and resumes, with a trainer and an accelerator in small around the real sampler."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the sampler is torch's")

from test_sampler_positions import sampler_of

from kohya_bucket.sdscripts.resume import Run


class Accelerator:
    """Counts batches as accelerate does for gradient accumulation, and calls the hooks of saved states."""

    def __init__(self, accumulate):
        self.accumulate, self.step = accumulate, 0
        self.hooks = {}

    def register_save_state_pre_hook(self, hook):
        self.hooks["save"] = hook

    def register_load_state_pre_hook(self, hook):
        self.hooks["load"] = hook

    def sync(self, last):
        self.step = 0 if last else self.step + 1
        return last or self.step % self.accumulate == 0


def train(folder, accumulate, total, *, resume=False, skip=False, stop=None, seed=5):
    """Images of each update, by a trainer that begins in the epoch its own state file says, and counts from 0."""
    sampler = sampler_of({}, 2, epoch=0, seed=seed)
    epoch, current_step = sampler.current_epoch, SimpleNamespace(value=0)
    arguments = SimpleNamespace(
        gradient_accumulation_steps=accumulate, max_train_steps=total, skip_until_initial_step=skip
    )
    run, accelerator = Run(), Accelerator(accumulate)
    run.watch(accelerator, arguments)
    run.attach(sampler, current_step)
    per_epoch = -(-len(sampler) // accumulate)
    first = 0
    if resume:
        accelerator.hooks["load"]([], str(folder))
        first = json.loads((folder / "train_state.json").read_text(encoding="utf-8"))["current_step"] // per_epoch
        assert not arguments.skip_until_initial_step
    updates, images = [], []
    for number in range(first, -(-total // per_epoch)):
        epoch.value = number + 1
        batches = list(sampler)
        for i, batch in enumerate(batches):
            current_step.value = len(updates)
            images += batch.images.tolist()
            if accelerator.sync(last=i == len(batches) - 1):
                updates.append(sorted(images))
                images = []
                if len(updates) == stop:
                    accelerator.hooks["save"]([], [], str(folder))
                    state = {"current_step": current_step.value + 1}
                    (folder / "train_state.json").write_text(json.dumps(state), encoding="utf-8")
                    return updates
            if len(updates) >= total:
                return updates
    return updates


@pytest.mark.parametrize("accumulate", [2, 3, 4])
@pytest.mark.parametrize("stop", [1, 7, "an epoch", "an epoch and 5"])
@pytest.mark.parametrize("more", [0, 3], ids=["whole epochs", "part of an epoch"])
def test_skipping_with_accumulation_goes_on_at_the_exact_image(tmp_path, accumulate, stop, more):
    per_epoch = -(-len(sampler_of({}, 2)) // accumulate)
    stop = {"an epoch": per_epoch, "an epoch and 5": per_epoch + 5}.get(stop, stop)
    total = 3 * per_epoch + more
    whole = train(tmp_path, accumulate, total)
    assert len(whole) == total
    begun = train(tmp_path, accumulate, total, stop=stop)
    again = train(tmp_path, accumulate, total, resume=True, skip=True, stop=per_epoch, seed=99)
    rest = train(tmp_path, accumulate, total, resume=True, skip=True, seed=77)
    assert begun + again + rest == whole


def test_a_place_that_the_trainer_is_told_is_left_to_it(tmp_path, caplog):
    train(tmp_path, 2, 30, stop=4)
    sampler = sampler_of({}, 2, epoch=0)
    arguments = SimpleNamespace(
        gradient_accumulation_steps=2, max_train_steps=30, skip_until_initial_step=True, initial_step=4
    )
    run, accelerator = Run(), Accelerator(2)
    run.watch(accelerator, arguments)
    run.attach(sampler)
    with caplog.at_level("WARNING", logger="kohya_bucket"):
        accelerator.hooks["load"]([], str(tmp_path))
    assert arguments.skip_until_initial_step
    assert "miscounts with gradient accumulation" in caplog.text
    assert sampler.end is None
