"""The real trainers of musubi-tuner (MUSUBI_DIR names a checkout), with tiny random models and its door open."""

import collections
import shutil

import pytest
from activated_env import LORA_SCRIPTS_NEXT, command, environment
from musubi_support import COUNT, ONCE, counted, make_data, train, trains_z_image

from kohya_bucket.trainers.door.trial import try_adapter

pytestmark = pytest.mark.slow


@pytest.fixture
def z_image(musubi_source, tmp_path):
    if not trains_z_image(musubi_source):
        pytest.skip("this version does not train Z-Image")
    return make_data(musubi_source, tmp_path, "zi")


@pytest.fixture
def hunyuan_video(musubi_source, tmp_path):
    return make_data(musubi_source, tmp_path, "hv")


@pytest.mark.training_run("zimage_train_network.py, resumed, also on 2 processes")
def test_a_training_that_is_stopped_and_resumed(musubi_source, z_image, tmp_path):
    whole, log = train(
        musubi_source, tmp_path, z_image, "whole", "--max_train_epochs", 2, "--save_state", "--save_every_n_steps", 5
    )
    half = len(whole) // 2
    assert [counted(whole[:half]), counted(whole[half:])] == [ONCE, ONCE]
    assert "is active" in log
    assert f"epoch 2: {COUNT} images, 0 missed, 0 repeated" in log
    assert "counts steps and epochs from 0 again" not in log
    state = tmp_path / "whole" / "model-step00000005-state"
    rest, log = train(musubi_source, tmp_path, z_image, "rest", "--max_train_epochs", 2, "--resume", state)
    assert "going on with batch 6 of epoch 1" in log
    assert "counts steps and epochs from 0 again: the rest of epoch 1 is its first epoch" in log
    assert rest == whole[5:]
    shared, _ = train(musubi_source, tmp_path, z_image, "two", "--max_train_epochs", 1, "--resume", state, ranks=2)
    assert counted(whole[:5]) + counted(shared) >= collections.Counter(ONCE)


@pytest.mark.training_run("zimage_train_network.py on 2 processes, losses weighed")
def test_each_item_of_a_step_weighs_the_same(musubi_source, z_image, tmp_path):
    """The mean of a process' loss is multiplied by its share of the step's items."""
    steps, _ = train(musubi_source, tmp_path, z_image, "two", "--max_train_epochs", 2, ranks=2)
    unequal = 0
    for step in steps:
        items = [len(row["items"]) for row in step]
        assert [row["scale"] for row in step] == pytest.approx([2 * n / sum(items) for n in items], abs=1e-3)
        unequal += items[0] != items[1]
    assert unequal


def test_hv_train_is_refused(musubi_source, hunyuan_video, tmp_path):
    trained, log = train(
        musubi_source, tmp_path, hunyuan_video, "refused", "--max_train_epochs", 1, program="hv_train", code=2
    )
    assert not trained
    assert "hv_train.py cannot train, with this package or without" in log
    assert "Traceback" not in log


def test_hv_train_by_itself_does_not(musubi_source, hunyuan_video, tmp_path):
    """If this ever fails, musubi-tuner has mended it."""
    more = {"program": "hv_train", "door": (), "code": 1}
    trained, log = train(musubi_source, tmp_path, hunyuan_video, "alone", "--max_train_epochs", 1, **more)
    assert not trained
    assert "collator_class.__init__() takes 3 positional arguments but 4 were given" in log


@pytest.mark.training_run("zimage_train_network.py, activated")
def test_from_an_activated_environment(musubi_source, z_image, tmp_path):
    python = environment(tmp_path / "env")
    assert command(python, "activate")[0] == 0
    steps, log = train(musubi_source, tmp_path, z_image, "on", "--max_train_epochs", 1, door=(), python=python)
    assert log.count("is active") == 1
    assert counted(steps) == ONCE
    door = ("-m", "accelerate.commands.launch", "--num_cpu_threads_per_process", "1", "--quiet")
    told = LORA_SCRIPTS_NEXT | {"PYTHONPATH": str(musubi_source)}
    more = {"door": door, "python": python, **told}
    steps, log = train(musubi_source, tmp_path, z_image, "next", "--max_train_epochs", 1, **more)
    assert log.count("is active") == 1
    assert counted(steps) == ONCE
    assert command(python, "activate", "--off")[0] == 0
    _, log = train(musubi_source, tmp_path, z_image, "off", "--max_train_epochs", 1, door=(), python=python)
    assert "kohya_bucket" not in log


def test_a_version_that_is_not_known_is_refused(musubi_source, tmp_path):
    copy = tmp_path / "musubi-tuner"
    shutil.copytree(musubi_source, copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (copy / "src" / "musubi_tuner" / "dataset").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("bucket_batch_indices", "batches_by_bucket"), encoding="utf-8")
    trial = try_adapter(copy / "src", "kohya_bucket.trainers.musubi.door", ["musubi_tuner.dataset.config_utils"])
    assert not trial.active
    assert "BucketBatchManager has no bucket_batch_indices" in trial.refused
