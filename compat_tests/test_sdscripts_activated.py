"""Trainings of an untouched checkout, started as GUIs do, where `kohya-bucket activate` was run."""

import pytest
from activated_env import LORA_SCRIPTS_NEXT, command, environment
from sdscripts_support import random_sizes, write_images
from test_sdscripts_training import COUNT, NAMES, epochs_of
from training_runs import train, write_config

ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_cpu_threads_per_process", "1")
pytestmark = pytest.mark.slow


@pytest.fixture
def data(unpatched, tmp_path):
    write_images(tmp_path / "images", random_sizes(COUNT, 1, 100, 300))
    return tmp_path / "images"


@pytest.mark.training_run("activated")
def test_an_activated_environment_trains_the_plan_and_another_does_not(sd_scripts_dir, data, tmp_path):
    python, other = environment(tmp_path / "env"), environment(tmp_path / "other")

    # Beside the sitecustomize of the tiny models, which waits for modules too and is not taken away.
    settings = {name: value for name, value in LORA_SCRIPTS_NEXT.items() if name != "PYTHONPATH"}

    def trained(name, door=ACCELERATE, ranks=1, python=python, told=None):
        config = write_config(tmp_path, data)
        return train(
            sd_scripts_dir,
            config,
            "--max_train_epochs",
            2,
            out=tmp_path / name,
            door=door,
            ranks=ranks,
            python=python,
            told=told,
        )

    assert command(python, "activate", "--status")[0] == 1
    status, said = command(python, "activate")
    assert status == 0, said
    launcher = ("-m", "kohya_bucket.launch")
    ways = [("gui", ACCELERATE, 1, None), ("next", ACCELERATE, 1, settings), ("launcher", launcher, 1, None)]
    for name, door, ranks, told in (*ways, ("two", (), 2, None)):
        run = trained(name, door, ranks, told=told)
        run.assert_trained(len(run.batches))
        assert epochs_of(run.batches, 2) == [NAMES, NAMES]
        assert run.log.count("is active") == 1
    runs = [trained("other", python=other)]
    assert command(other, "activate", "--status")[0] == 1
    assert command(python, "activate", "--off")[0] == 0
    runs.append(trained("without"))
    for without in runs:
        assert without.status == 0
        assert "kohya_bucket" not in without.log
        assert epochs_of(without.batches, 2) != [NAMES, NAMES]  # with its two workers
