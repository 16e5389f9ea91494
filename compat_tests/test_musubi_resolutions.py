"""One image at several resolutions in the real musubi-tuner (MUSUBI_DIR names a checkout): a dataset for each."""

import collections

import pytest
from musubi_support import COUNT, ONCE, SIZES, counted, epochs, family, make_caches, make_data, train, trains_z_image

from kohya_bucket.trainers.musubi.architectures import ARCHITECTURES
from kohya_bucket.trainers.musubi.config import read_config
from kohya_bucket.trainers.musubi.plan import overview

pytestmark = pytest.mark.slow
SCHEDULE = "resolution_mode = 'schedule'\nresolution_epochs = [2]"


def add_resolution(source, folder, config, table, **keys):
    """A second dataset of the same images, at 64x64, and a table of options."""
    make_caches(source, folder / "smaller", family(source), side=64)
    more = ["[[datasets]]", f"image_directory = '{folder / 'images'}'", f"cache_directory = '{folder / 'smaller'}'"]
    more += ["resolution = [64, 64]", *(f"{key} = {value}" for key, value in keys.items()), "[kohya_bucket]", table, ""]
    config.write_text(config.read_text(encoding="utf-8") + "\n".join(more), encoding="utf-8")


def side_of(row):
    return 128 if row["size"][0] * row["size"][1] > 150 else 64


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_resolution_after_another(musubi_source, tmp_path, ranks):
    """All epochs have the same number of steps, which the trainer asks for once."""
    config = make_data(musubi_source, tmp_path, family(musubi_source))
    add_resolution(musubi_source, tmp_path, config, SCHEDULE, batch_size=3)
    found = epochs(musubi_source, tmp_path, config, ranks, count=4)
    for epoch, side in zip(found, [128, 128, 64, 64], strict=True):
        counts = counted(epoch)
        assert set(counts) == set(range(COUNT))
        assert sum(counts.values()) - COUNT < ranks
        assert {side_of(row) for step in epoch for row in step} == {side}
    assert len({len(epoch) for epoch in found}) == 1


@pytest.mark.training_run("zimage_train_network.py, one resolution after another, resumed, also on 2 processes")
def test_a_training_that_is_resumed_before_the_switch(musubi_source, tmp_path):
    if not trains_z_image(musubi_source):
        pytest.skip("this version does not train Z-Image")
    config = make_data(musubi_source, tmp_path, "zi")
    add_resolution(musubi_source, tmp_path, config, SCHEDULE)
    more = ("--max_train_epochs", 3)
    whole, _ = train(musubi_source, tmp_path, config, "whole", *more, "--save_state", "--save_every_n_steps", 5)
    steps = len(whole) // 3
    assert [counted(whole[i * steps : (i + 1) * steps]) for i in range(3)] == [ONCE] * 3
    read = read_config(config, ARCHITECTURES["zi"])
    planned = [(row.epochs, row.steps, row.samples) for row in overview(read, read.options).gpus]
    assert planned == [("1 to 2", steps, COUNT), ("from 3", steps, COUNT)]
    state = tmp_path / "whole" / "model-step00000005-state"
    rest, log = train(musubi_source, tmp_path, config, "rest", *more, "--resume", state)
    assert "going on with batch 6 of epoch 1" in log
    assert rest == whole[5:]
    shared, _ = train(musubi_source, tmp_path, config, "two", *more, "--resume", state, ranks=2)
    seen = counted(whole[:5]) + counted(shared)
    assert set(seen) == set(range(COUNT))
    assert min(seen.values()) == 3
    assert sum(seen.values()) - 3 * COUNT <= 3  # a short step repeats an item, so that no process is empty


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_image_at_each_resolution_in_every_epoch(musubi_source, tmp_path, ranks):
    """One of them twice as often as the other, on any number of processes; with one shape per step."""
    config = make_data(musubi_source, tmp_path, family(musubi_source))
    add_resolution(musubi_source, tmp_path, config, "step_shapes = 'one'", num_repeats=2)
    for epoch in epochs(musubi_source, tmp_path, config, ranks, count=2):
        assert all(len({tuple(row["size"]) for row in step}) == 1 for step in epoch)
        counts = collections.Counter()
        for row in (row for step in epoch for row in step):
            counts.update((item, side_of(row)) for item in row["items"])
        asked = {(item, side): repeats for item in range(COUNT) for side, repeats in ((128, 1), (64, 2))}
        assert counts.keys() == asked.keys()
        assert all(counts[key] >= times for key, times in asked.items())
        assert sum(counts.values()) - sum(asked.values()) <= (ranks - 1) * 2 * len(SIZES)
