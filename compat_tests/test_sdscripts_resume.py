"""Stopping and resuming sd-scripts' real data path, on the same and on another number of processes."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sdscripts_support import random_sizes, write_images

SCRIPT = Path(__file__).with_name("resume_script.py")
IMAGES = 23


@pytest.fixture
def config(tmp_path):
    write_images(tmp_path / "a", random_sizes(IMAGES, 1, 60, 300))
    subset = {"image_dir": str(tmp_path / "a"), "class_tokens": "x", "num_repeats": 2}
    dataset = {"resolution": 128, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"datasets": [{**dataset, "subsets": [subset]}]}), encoding="utf-8")
    return file


def train(sd_scripts_dir, config, name, ranks=1, **options):
    """Batches in the order they were trained: a list of steps, each with one row per rank."""
    arguments = [str(config), name, "--state", "state"]
    for key, value in options.items():
        arguments += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {
        **os.environ,
        "SD_SCRIPTS_DIR": str(sd_scripts_dir),
        # Another accelerate than the installed one, where a folder holds it.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [os.environ.get("KOHYA_BUCKET_ACCELERATE"), str(Path(__file__).parents[1])])
        ),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *arguments],
        cwd=config.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    per_rank = [json.loads((config.parent / f"{name}.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
    assert len({len(rows) for rows in per_rank}) == 1
    return list(zip(*per_rank, strict=True))


def images(steps):
    return collections.Counter(key for step in steps for row in step for key in row["keys"])


def whole_epochs(epochs):
    return {f"img_{i:03d}.png": 2 * epochs for i in range(IMAGES)}


ONE_SHAPE = {"step_shapes": "one"}


def with_table(config, table):
    content = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**content, "kohya_bucket": table}), encoding="utf-8")


def assert_one_shape_per_step(steps):
    assert all(len({tuple(row["shape"]) for row in step}) == 1 for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"accumulate": 2, "seed": 5}, {"accumulate": 2, "seed": 77}),
        ({"ranks": 2, "batch_size": 1}, {"ranks": 1, "batch_size": 2, "workers": 2}),
    ],
    ids=["one process", "another seed, with accumulation", "two processes, then one"],
)
def test_a_resumed_run_equals_the_uninterrupted_one(unpatched, sd_scripts_dir, config, first, second):
    with_table(config, ONE_SHAPE)
    whole = train(sd_scripts_dir, config, "whole", **first)
    begun = train(sd_scripts_dir, config, "begun", **first, save_at=17)
    resumed = train(sd_scripts_dir, config, "resumed", **second, resume=True)
    merged = [[sorted(key for row in step for key in row["keys"])] for step in [*begun, *resumed]]
    expected = [[sorted(key for row in step for key in row["keys"])] for step in whole]
    assert merged[: len(expected)] == expected
    assert_one_shape_per_step(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_with_another_global_batch_the_rest_of_the_epoch_is_trained_once(unpatched, sd_scripts_dir, config, ranks):
    begun = train(sd_scripts_dir, config, "begun", ranks=2, batch_size=2, save_at=3)
    rest = train(sd_scripts_dir, config, "rest", ranks=ranks, batch_size=3, resume=True, epochs=1)
    assert images(begun) + images(rest) == collections.Counter(whole_epochs(1))


@pytest.mark.slow
def test_a_changed_data_set_is_named_and_begins_anew(unpatched, sd_scripts_dir, config):
    train(sd_scripts_dir, config, "begun", save_at=3)
    write_images(config.parent / "a", [(100, 100)], prefix="new")
    after = train(sd_scripts_dir, config, "after", resume=True, epochs=1)
    assert images(after) == {**whole_epochs(1), "new_000.png": 2}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2, 8])
def test_two_processes_train_each_image_as_often_as_asked(unpatched, sd_scripts_dir, config, workers):
    steps = train(sd_scripts_dir, config, "two", ranks=2, workers=workers, epochs=2)
    for epoch in (1, 2):
        assert images(step for step in steps if step[0]["epoch"] == epoch) == whole_epochs(1)


SEVERAL = [
    {"remainder": "merge", "merge_max_crop": 0.5},
    {"resolutions": [128, 192], "resolution_mode": "rotate", "remainder": "catch_all"},
    {"resolutions": [128, 192], "resolution_mode": "schedule", "resolution_epochs": [1]},
]


@pytest.mark.slow
@pytest.mark.parametrize("table", SEVERAL, ids=["merge", "rotate and catch_all", "schedule"])
def test_images_at_several_sizes_on_two_processes_and_resumed_on_one(unpatched, sd_scripts_dir, config, table):
    with_table(config, table | ONE_SHAPE)
    whole = train(sd_scripts_dir, config, "whole", ranks=2, epochs=2, workers=2)
    assert_one_shape_per_step(whole)
    begun = train(sd_scripts_dir, config, "begun", ranks=2, save_at=5)
    assert begun == whole[: len(begun)]
    same = train(sd_scripts_dir, config, "same", ranks=1, batch_size=4, resume=True, epochs=2)
    merged = [sorted(key for row in step for key in row["keys"]) for step in [*begun, *same]]
    expected = [sorted(key for row in step for key in row["keys"]) for step in whole]
    # Alone, no process needs a repeat: the steps hold the same images, each once.
    assert [sorted(set(step)) for step in merged] == [sorted(set(step)) for step in expected]
    sizes = [[step[0]["shape"][-2:] for step in steps] for steps in ([*begun, *same], whole)]
    assert sizes[0] == sizes[1]  # over the switch of a schedule too
    other = train(sd_scripts_dir, config, "other", ranks=1, batch_size=3, resume=True, epochs=1)
    assert images(begun) + images(other) == collections.Counter(whole_epochs(1))
