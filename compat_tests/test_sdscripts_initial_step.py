"""`--resume`, `--initial_step`, `--initial_epoch` and `--skip_until_initial_step` in the real `train_network.py`.

Each run begins where an uninterrupted run has made so many updates, and trains the same images from there on, and the
same weights where a state is loaded.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import training_runs
from sdscripts_support import metadata, random_sizes, tensors, write_images

EVERY = 5
pytestmark = [pytest.mark.slow, pytest.mark.training_run("resumed")]


def train(sd_scripts_dir, folder, name, *options, accumulate=2, ranks=1, batch_size=2, total=17, table=""):
    """(batches in the order they were trained, log, folder with what was saved)."""
    config = training_runs.write_config(folder, folder / "images", table, batch_size=batch_size)
    options += ("--network_train_unet_only", "--lr_scheduler", "cosine", "--gradient_accumulation_steps", accumulate)
    options += ("--save_every_n_steps", EVERY, "--save_state")
    options = ("--max_train_steps", total, *options)
    run = training_runs.train(sd_scripts_dir, config, *options, out=folder / name, ranks=ranks)
    assert run.status == 0, run.log[-3000:]
    return run.batches, run.log, run.out


@dataclass
class Whole:
    """An uninterrupted run that trains into its third epoch, with a state in its second."""

    folder: Path
    layout: dict[str, int]
    total: int
    saved: int
    batches: list[tuple[dict[str, Any], ...]]
    updates_per_epoch: int
    batches_per_epoch: int

    @property
    def state(self):
        return self.folder / "whole" / f"lora-step{self.saved:08d}-state"

    def after(self, update):
        """(batches that are still to be trained after so many updates, batch of its epoch that they begin with)."""
        epoch, updates = divmod(update, self.updates_per_epoch)
        first = updates * self.layout["accumulate"]
        return self.batches[epoch * self.batches_per_epoch + first :], first + 1


@pytest.fixture(scope="module")
def whole_run(unpatched, sd_scripts_dir, tmp_path_factory):
    made = {}

    def run(total, saved, accumulate, ranks=1, batch_size=2, table=""):
        layout = {"accumulate": accumulate, "ranks": ranks, "batch_size": batch_size, "table": table}
        key = tuple(layout.values())
        if key not in made:
            folder = tmp_path_factory.mktemp("runs")
            write_images(folder / "images", random_sizes(23, 1, 60, 300))
            batches, _, out = train(sd_scripts_dir, folder, "whole", "--seed", 3, total=total, **layout)
            per_epoch = int(metadata(out / "lora.safetensors")["ss_num_batches_per_epoch"])
            updates = -(-per_epoch // accumulate)
            assert updates < saved < 2 * updates < total
            made[key] = Whole(folder, layout, total, saved, batches, updates, per_epoch)
        return made[key]

    return run


def assert_counts_on(out, first, total):
    """Steps in file names, metadata and states are those of the uninterrupted run."""
    assert metadata(out / "lora.safetensors")["ss_steps"] == str(total)
    steps = [step for step in range(EVERY, total + 1, EVERY) if step > first]
    names = [f"lora-step{step:08d}" for step in steps]
    assert sorted(file.stem for file in out.glob("lora-step*.safetensors")) == names
    for step, name in zip(steps, names, strict=True):
        state = json.loads((out / f"{name}-state" / "train_state.json").read_text(encoding="utf-8"))
        assert state["current_step"] == step


SKIP = "--skip_until_initial_step"


@pytest.mark.parametrize(
    ("accumulate", "options"),
    [
        (2, []),
        (2, [SKIP]),
        (2, ["--initial_step", 10]),
        (2, ["--initial_step", 10, SKIP]),
        (1, [SKIP]),
        (1, ["--initial_step", 20, SKIP]),
    ],
)
def test_a_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(
    sd_scripts_dir, whole_run, tmp_path, accumulate, options
):
    whole = whole_run(17, 10, 2) if accumulate == 2 else whole_run(30, 20, 1)
    options = ["--resume", whole.state, *options]
    rest, log, out = train(sd_scripts_dir, whole.folder, tmp_path.name, *options, total=whole.total, **whole.layout)
    expected, batch = whole.after(whole.saved)
    assert f"going on after update {whole.saved}, with batch {batch} of epoch 2 " in log
    assert rest == expected
    assert tensors(out / "lora.safetensors") == tensors(whole.folder / "whole" / "lora.safetensors")
    assert_counts_on(out, whole.saved, whole.total)


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (["--initial_step", 5], 5),
        (["--initial_step", 12, SKIP], 12),
        (["--initial_epoch", 2], 7),
        (["--initial_epoch", 3, SKIP], 14),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_an_update_asked_for_by_its_number(sd_scripts_dir, whole_run, tmp_path, options, first, resume):
    whole = whole_run(17, 10, 2)
    assert whole.updates_per_epoch == 7
    options += ["--resume", whole.state, "--seed", 9] if resume else ["--seed", 3]
    rest, log, out = train(sd_scripts_dir, whole.folder, tmp_path.name, *options, total=whole.total, **whole.layout)
    assert rest == whole.after(first)[0]
    assert_counts_on(out, first, whole.total)
    assert (", though the state was saved after update 10" in log) == resume


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", [[SKIP], ["--initial_epoch", 3]])
def test_on_another_number_of_processes(sd_scripts_dir, whole_run, tmp_path, ranks, options):
    """The same global batch, in a run that two processes began: the same images in each step."""
    table = "[kohya_bucket]\nstep_shapes = 'one'"  # one process has no second shape for a step
    whole = whole_run(17, 10, 2, ranks=2, batch_size=1, table=table)
    rest, _, out = train(
        sd_scripts_dir,
        whole.folder,
        tmp_path.name,
        *["--resume", whole.state, *options],
        accumulate=2,
        ranks=ranks,
        batch_size=2 // ranks,
        total=whole.total,
        table=table,
    )
    first = whole.saved if SKIP in options else 2 * whole.updates_per_epoch
    # One process trains an image once that stood in for a second one where two shared a step.
    assert [images(step) for step in rest] == [images(step) for step in whole.after(first)[0]]
    assert_counts_on(out, first, whole.total)


def test_the_rest_of_an_epoch_with_another_global_batch(sd_scripts_dir, whole_run, tmp_path):
    """Each image that the epoch still owes once, under the epoch's own number, and the end where it is asked for."""
    whole = whole_run(17, 10, 2, ranks=2, batch_size=1)
    options = ["--resume", whole.state, "--max_train_epochs", 2]
    rest, log, out = train(sd_scripts_dir, whole.folder, tmp_path.name, *options, batch_size=3)
    begun = whole.batches[whole.batches_per_epoch : -len(whole.after(whole.saved)[0])]
    before = {image for step in begun for image in images(step)}
    trained = [image for step in rest for row in step for image in row["images"]]
    assert sorted([*before, *trained]) == sorted(f"number {i}" for i in range(23))
    assert f"of epoch 2 (update {whole.saved} of the saved run" in log
    about = metadata(out / "lora.safetensors")
    assert (about["ss_epoch"], int(about["ss_steps"])) == ("2", 2 * -(-int(about["ss_num_batches_per_epoch"]) // 2))


def images(step):
    return sorted({image for row in step for image in row["images"]})
