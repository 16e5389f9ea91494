"""Images at another size than their bucket's in sd-scripts' real data path: merged, caught, several resolutions."""

import collections

import pytest
import torch
from sdscripts_support import MeanVAE, build_groups, random_sizes, write_images
from several_sizes import (
    COUNT,
    MERGE,
    ROTATE,
    TABLES,
    assert_asked,
    at_size,
    batches_of,
    cache_group,
    cached,
    config_of,
    sizes_of,
    trained,
)  # fmt: skip

from kohya_bucket.trainers.sdscripts.config import read_config
from kohya_bucket.trainers.sdscripts.make_buckets import bucket_info
from kohya_bucket.trainers.sdscripts.plan import overview

every_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@every_table
@pytest.mark.parametrize("workers", [0, 2])
def test_every_image_as_often_as_asked_and_at_the_planned_size(patched, tmp_path, table, workers):
    group, _ = build_groups(patched, config_of(tmp_path, table, repeats=2))
    dataset = group.datasets[0]
    home = {key: tuple(info.bucket_reso) for key, info in dataset.image_data.items()}
    seen = batches_of(patched, group, epochs=4, workers=workers)
    assert_asked(seen, table, home, 2)
    elsewhere = 0
    for batch in (b for epoch in seen for b in epoch):
        size = sizes_of(batch)
        for key, picture, target in zip(batch["image_keys"], batch["images"], batch["target_sizes_hw"], strict=True):
            elsewhere += home[key] != size
            assert tuple(target.tolist()) == (size[1], size[0])
            assert torch.equal(picture, at_size(patched, dataset.image_data[key], size))
    assert elsewhere > 0
    assert {key: tuple(info.bucket_reso) for key, info in dataset.image_data.items()} == home


@every_table
def test_the_plan_command_counts_the_same_steps(patched, tmp_path, table):
    config = config_of(tmp_path, table, repeats=3)
    group, _ = build_groups(patched, config, seed=99)
    file = tmp_path / "dataset.toml"
    import toml

    file.write_text(toml.dumps(config), encoding="utf-8")
    read = read_config(file)
    settings = read.options
    seen = overview(read, settings, [1])
    group.datasets[0].seed = 12345
    epochs = batches_of(patched, group, epochs=3)
    assert {len(epoch) for epoch in epochs} == {seen.gpus[0].steps}
    assert seen.gpus[0].samples == sum(len(b["image_keys"]) for b in epochs[0])
    assert len(group) == seen.gpus[0].steps
    assert bucket_info(seen.datasets[0].items) == group.datasets[0].bucket_info


def test_merge_trains_fewer_steps_than_keep(patched, tmp_path):
    steps = {}
    for name, table in {"keep": {}, "merge": MERGE, "catch_all": TABLES["catch_all"]}.items():
        group, _ = build_groups(patched, config_of(tmp_path, table))
        steps[name] = len(batches_of(patched, group, epochs=1)[0])
    assert steps["catch_all"] == -(-COUNT // 4)
    assert steps["catch_all"] <= steps["merge"] < steps["keep"]


def test_rotate_trains_each_image_at_each_resolution_in_turn(patched, tmp_path):
    group, _ = build_groups(patched, config_of(tmp_path, ROTATE))
    plain, _ = build_groups(patched, config_of(tmp_path, None))
    assert group.num_train_images == plain.num_train_images == COUNT
    two = sum(trained(batches_of(patched, group, epochs=2)), collections.Counter())
    assert set(two.values()) == {1}
    assert len(two) == 2 * COUNT
    areas = collections.Counter(width * height > 128 * 128 for _, (width, height) in two)
    assert areas == {True: COUNT, False: COUNT}
    both, _ = build_groups(patched, config_of(tmp_path, TABLES["all"]))
    assert both.num_train_images == 2 * COUNT
    if hasattr(both, "get_resolutions"):
        assert both.get_resolutions() == [(128, 128), (192, 192)]


def test_a_schedule_of_resolutions(patched, tmp_path):
    table = {"resolutions": [128, 192], "resolution_mode": "schedule", "resolution_epochs": [2]}
    group, _ = build_groups(patched, config_of(tmp_path, table))
    epochs = batches_of(patched, group, epochs=4, workers=2)
    assert {len(epoch) for epoch in epochs} == {len(group)}
    for epoch, counts in enumerate(trained(epochs)):
        assert sum(counts.values()) == COUNT
        assert {key for key, _ in counts} == set(group.datasets[0].image_data)
        assert {width * height > 128 * 128 for _, (width, height) in counts} == {epoch >= 2}


def test_a_schedule_of_datasets(patched, tmp_path):
    """Without `resolutions`: the datasets one after another, by their own."""
    config = config_of(tmp_path, {"resolution_mode": "schedule", "resolution_epochs": [2]})
    config["datasets"].append({**config["datasets"][0], "resolution": 192, "batch_size": 2})
    group, _ = build_groups(patched, config)
    epochs = batches_of(patched, group, epochs=4, workers=2)
    assert len({len(epoch) for epoch in epochs}) == 1
    for epoch, counts in enumerate(trained(epochs)):
        assert sum(counts.values()) == COUNT
        assert {key for key, _ in counts} == set(group.datasets[0].image_data)
        assert {width * height > 128 * 128 for _, (width, height) in counts} == {epoch >= 2}
    del config["datasets"][1]
    with pytest.raises(SystemExit, match="of 2 resolutions one after another, but they have 1 resolution"):
        batches_of(patched, build_groups(patched, config)[0])


def test_without_upscaling_nothing_is_enlarged(patched, tmp_path):
    for table in (MERGE, {**ROTATE, **MERGE}, TABLES["all"]):
        group, _ = build_groups(patched, config_of(tmp_path, table, bucket_no_upscale=True))
        data = group.datasets[0].image_data
        for counts in trained(batches_of(patched, group, epochs=2)):
            for key, (width, height) in counts:
                assert width <= data[key].image_size[0]
                assert height <= data[key].image_size[1]
            assert set(counts.values()) == {1}
            assert {key for key, _ in counts} == set(data)


def test_a_group_that_is_walked_by_number(patched, tmp_path):
    """sd-scripts' preview (--debug_dataset) does."""
    config = config_of(tmp_path, {**ROTATE, **MERGE})
    config["datasets"].append({**config["datasets"][0], "batch_size": 3})
    group, _ = build_groups(patched, config)
    for dataset in group.datasets:
        dataset.debug_dataset = True
    group.set_current_epoch(1)
    keys = collections.Counter(key for i in range(len(group)) for key in group[i]["image_keys"])
    assert set(keys.values()) == {2}
    assert len(keys) == COUNT


def test_control_images_follow(patched, tmp_path):
    config = config_of(tmp_path, {**ROTATE, **MERGE})
    write_images(tmp_path / "c", random_sizes(COUNT, 1, 60, 300))
    config["datasets"][0]["subsets"][0]["conditioning_data_dir"] = str(tmp_path / "c")
    group, _ = build_groups(patched, config)
    seen = batches_of(patched, group, epochs=2, workers=2)
    assert_asked(seen, ROTATE, group.datasets[0].image_data, 1)
    for batch in (b for epoch in seen for b in epoch):
        assert batch["conditioning_images"].shape == batch["images"].shape


@pytest.mark.slow
def test_spawned_workers_as_on_windows(patched, tmp_path):
    group, _ = build_groups(patched, config_of(tmp_path, {**ROTATE, **MERGE}))
    keys = list(group.datasets[0].image_data)
    assert_asked(batches_of(patched, group, epochs=2, workers=2, context="spawn"), ROTATE, keys, 1)


# -- caches ----------------------------------------------------------------------------------------


@every_table
@pytest.mark.parametrize("kind", ["memory", "npz", "shards"])
def test_latents_are_cached_at_every_size(patched, tmp_path, table, kind):
    if kind == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet", exc_type=ImportError)
        table = {**table, "latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")}
    config = config_of(tmp_path, table)
    config["datasets"][0]["subsets"][0]["flip_aug"] = True
    encoder = MeanVAE()
    group = cached(patched, config, encoder, kind != "memory")
    data = group.datasets[0].image_data
    assert all(isinstance(key, str) for key in data)
    seen = batches_of(patched, group, epochs=4, workers=2)
    assert_asked(seen, table, data, 1)
    for batch in (b for epoch in seen for b in epoch):
        assert batch["images"] is None
        for key, latent, flipped in zip(batch["image_keys"], batch["latents"], batch["flippeds"], strict=True):
            picture = at_size(patched, data[key], sizes_of(batch))[None]
            picture = torch.flip(picture, dims=[3]) if flipped else picture
            assert torch.allclose(latent, MeanVAE().encode(picture).latent_dist.sample()[0], atol=1e-6)
    if kind != "memory":
        before = encoder.encoded
        again = cached(patched, config, encoder, True)
        assert encoder.encoded == before
        assert_asked(batches_of(patched, again, epochs=1), table, data, 1)


def test_files_at_other_sizes_are_not_taken_for_the_usual_ones(patched, tmp_path):
    """Without the adapter, and without its options, the folder looks as it always did."""
    encoder = MeanVAE()
    cached(patched, config_of(tmp_path, TABLES["all"]), encoder, True)
    names = sorted(path.name for path in (tmp_path / "a").glob("*.npz"))
    usual = [name for name in names if name.endswith("_sd.npz")]
    assert len(usual) == COUNT
    assert len([name for name in names if "_sd_at_" in name]) == COUNT
    before = encoder.encoded
    group = cached(patched, config_of(tmp_path, None), encoder, True)
    assert encoder.encoded == before
    assert all(info.latents_npz.endswith("_sd.npz") for info in group.datasets[0].image_data.values())


@pytest.mark.parametrize("length", [226, 232, 238])
def test_names_that_only_a_further_cache_would_make_too_long(patched, tmp_path, length):
    config = config_of(tmp_path, None)
    image = next((tmp_path / "a").glob("*.png"))
    image.rename(image.with_name("n" * length + ".png"))
    encoder = MeanVAE()
    cached(patched, config, encoder, True)
    assert encoder.encoded == COUNT
    encoder = MeanVAE()
    with pytest.raises(SystemExit, match="shorten the image's name"):
        cached(patched, config_of(tmp_path, TABLES["all"]), encoder, True)
    assert not encoder.encoded


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "dataset", "words"),
    [
        (ROTATE, {"enable_bucket": False}, "resolutions is set, but enable_bucket is off"),
        (TABLES["catch_all"], {"bucket_no_upscale": True}, "bucket_no_upscale forbids: use 'merge' or 'keep'"),
        ({"resolutions": [128, 2048]}, {}, "resolutions, 2048x2048: max_bucket_reso"),
    ],
)
def test_what_excludes_each_other_ends_the_run_with_one_line(patched, tmp_path, table, dataset, words):
    with pytest.raises(SystemExit, match=words):
        build_groups(patched, config_of(tmp_path, table, **dataset))


def test_one_file_per_image_is_refused_for_several_sizes(patched, tmp_path):
    if not hasattr(patched.train_util.BaseDataset, "cache_latents"):
        pytest.skip("this version caches by its strategies only")
    group, _ = build_groups(patched, config_of(tmp_path, MERGE))
    with pytest.raises(SystemExit, match="leave --cache_latents_to_disk out"):
        group.cache_latents(MeanVAE(), 2, True, True)


def test_latents_made_beforehand_are_refused(patched, tmp_path):
    config = config_of(tmp_path, MERGE)
    group, _ = build_groups(patched, config)
    dataset = group.datasets[0]
    for info in dataset.image_data.values():
        info.latents_npz = "made_beforehand.npz"
    with pytest.raises(SystemExit, match="come with latents of one size made beforehand"):
        cache_group(group, MeanVAE(), False)


def test_caching_tools_are_refused(patched, tmp_path):
    group, _ = build_groups(patched, config_of(tmp_path, ROTATE))
    if not hasattr(group, "set_caching_mode"):
        pytest.skip("this version's caching tools cache as its trainers do")
    group.set_caching_mode("latents")
    with pytest.raises(SystemExit, match="caching tools cache each image at one size"):
        group[0]
