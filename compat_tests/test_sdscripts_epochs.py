"""Epochs as the trainers iterate them: every image exactly its repeats, whatever the workers do."""

import collections
import multiprocessing
import os
import random

import numpy as np
import pytest
import torch
from sdscripts_support import build_groups, random_sizes, write_images, write_metadata

from kohya_bucket.originals.loaders import run_loader

BATCH = 2


def group_config(tmp_path, count=41, repeats=1, **subset):
    write_images(tmp_path / "a", random_sizes(count, 1, 60, 300))
    subset = {"image_dir": str(tmp_path / "a"), "num_repeats": repeats, "caption_extension": ".txt", **subset}
    dataset = {"resolution": 128, "batch_size": BATCH, "enable_bucket": True, "min_bucket_reso": 64}
    return {"datasets": [{**dataset, "max_bucket_reso": 512, "subsets": [subset]}]}


def loader_of(sd, group, epoch, workers=0, persistent=False, context=None):
    """The call that every trainer of sd-scripts makes."""
    step = multiprocessing.get_context(context).Value("i", 0)
    collator = sd.train_util.collator_class(epoch, step, group if workers == 0 else None)
    return torch.utils.data.DataLoader(
        group,
        batch_size=1,
        shuffle=True,
        collate_fn=collator,
        num_workers=workers,
        persistent_workers=persistent,
        multiprocessing_context=context,
    )


def train(sd, group, epochs=3, **arguments):
    """Image keys per epoch and batch."""
    for dataset in group.datasets:
        dataset.debug_dataset = True
        getattr(dataset, "dreambooth_dataset_delegate", dataset).debug_dataset = True
    epoch = multiprocessing.get_context(arguments.get("context")).Value("i", 0)
    loader = loader_of(sd, group, epoch, **arguments)
    seen = []
    for number in range(epochs):
        epoch.value = number + 1
        seen.append([list(batch["image_keys"]) for batch in loader])
        assert len(seen[-1]) == len(loader)
    return seen


def assert_exact(seen, group):
    asked = collections.Counter()
    for dataset in group.datasets:
        for key, info in dataset.image_data.items():
            asked[key] += info.num_repeats
    orders = [tuple(map(tuple, epoch)) for epoch in seen]
    assert len(set(orders)) == len(orders)
    for epoch in seen:
        assert collections.Counter(key for batch in epoch for key in batch) == asked


WORKERS = [
    {"workers": 0},
    {"workers": 1},
    {"workers": 2},
    {"workers": 2, "persistent": True},
    {"workers": 8},
    {"workers": 8, "persistent": True},
]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_every_epoch_trains_each_image_exactly_its_repeats(patched, tmp_path, workers):
    group, _ = build_groups(patched, group_config(tmp_path, repeats=2))
    assert_exact(train(patched, group, **workers), group)


def test_the_largest_batch_comes_first(patched, tmp_path):
    config = {**group_config(tmp_path), "kohya_bucket": {"largest_first": True}}
    group, _ = build_groups(patched, config)
    seen = train(patched, group, workers=2)
    assert_exact(seen, group)
    shapes = {key: info.bucket_reso for dataset in group.datasets for key, info in dataset.image_data.items()}
    for epoch in seen:
        pixels = [len(batch) * np.prod(shapes[batch[0]]) for batch in epoch]
        head = len(set(shapes.values()))
        assert pixels[0] == max(pixels)
        assert {shapes[batch[0]] for batch in epoch[:head]} == set(shapes.values())


@pytest.mark.parametrize("table", [{}, {"largest_first": False}], ids=["by default", "off"])
def test_the_first_step_shows_whether_a_run_fits_into_memory(patched, tmp_path, table):
    config = {**group_config(tmp_path), "kohya_bucket": table}
    write_images(tmp_path / "a", [(70, 210)] * 41)  # of which no batch is as large as
    write_images(tmp_path / "b", [(150, 150)] * BATCH)
    config["datasets"][0]["subsets"].append({"image_dir": str(tmp_path / "b"), "caption_extension": ".txt"})
    random.seed(3)  # of which sd-scripts draws the seed of the datasets
    group, _ = build_groups(patched, config)
    seen = train(patched, group, workers=2)
    assert_exact(seen, group)
    large = set(map(str, (tmp_path / "b").glob("*.png")))
    at = [[set(batch) for batch in epoch].index(large) for epoch in seen]
    assert (at[0] == 0) == (not table)
    assert 0 not in at[1:]


def test_the_original_misses_images_with_two_workers(unpatched, tmp_path):
    """What the adapter is for; if this ever fails, sd-scripts has mended it."""
    group, _ = build_groups(unpatched, group_config(tmp_path))
    missed = [41 - len({k for batch in epoch for k in batch}) for epoch in train(unpatched, group, workers=2)]
    assert max(missed) > 0


def test_what_the_original_misses_is_what_compare_shows(unpatched, tmp_path):
    """With its default 8 workers; the numbers are drawn, so means over epochs are compared."""
    group, _ = build_groups(unpatched, group_config(tmp_path, count=150))
    buckets = group.datasets[0].bucket_manager.buckets
    ids = [k for k, bucket in enumerate(buckets) for _ in bucket]
    epochs = [[key for batch in epoch for key in batch] for epoch in train(unpatched, group, epochs=8, workers=8)]
    left_out = np.mean([150 - len(set(epoch)) for epoch in epochs])
    repeated = np.mean([len(epoch) - len(set(epoch)) for epoch in epochs])
    restated = run_loader("sd-scripts", ids, [1] * len(buckets), BATCH, epochs=200)
    assert left_out == pytest.approx(restated.left_out, abs=3)
    assert repeated == pytest.approx(restated.repeated, abs=3)


@pytest.mark.slow
def test_spawned_workers_as_on_windows(patched, tmp_path):
    group, _ = build_groups(patched, group_config(tmp_path))
    assert_exact(train(patched, group, workers=2, context="spawn", epochs=2), group)


@pytest.mark.parametrize("kind", ["finetuning", "controlnet", "several"])
def test_every_kind_of_dataset(patched, tmp_path, kind):
    config = group_config(tmp_path)
    subset = config["datasets"][0]["subsets"][0]
    if kind == "finetuning":
        paths = sorted((tmp_path / "a").glob("*.png"))
        file = write_metadata(tmp_path / "meta.json", paths)
        config["datasets"][0]["subsets"] = [{"image_dir": str(tmp_path / "a"), "metadata_file": str(file)}]
    elif kind == "controlnet":
        write_images(tmp_path / "c", random_sizes(41, 1, 60, 300))
        subset["conditioning_data_dir"] = str(tmp_path / "c")
    else:
        write_images(tmp_path / "b", random_sizes(7, 2, 60, 300), prefix="other")
        write_images(tmp_path / "r", random_sizes(5, 3, 60, 300), prefix="reg")
        regularization = {"image_dir": str(tmp_path / "r"), "is_reg": True, "class_tokens": "x"}
        other = {"image_dir": str(tmp_path / "b"), "num_repeats": 3, "class_tokens": "y"}
        config["datasets"].append({**config["datasets"][0], "batch_size": 5, "subsets": [other, regularization]})
    group, _ = build_groups(patched, config)
    seen = train(patched, group, workers=2)
    assert_exact(seen, group)
    if kind == "several":
        first = group.datasets[0].image_data
        assert all(len({key in first for key in batch}) == 1 for epoch in seen for batch in epoch)


def flips_and_captions(sd, group, **arguments):
    epoch = multiprocessing.Value("i", 1)
    batches = list(loader_of(sd, group, epoch, **arguments))
    return [tuple(batch["flippeds"]) for batch in batches], [tuple(batch["captions"]) for batch in batches]


def test_flips_differ_between_batches_and_not_with_the_workers(patched, tmp_path):
    config = group_config(tmp_path, flip_aug=True, shuffle_caption=True, repeats=3)
    group, _ = build_groups(patched, config)
    group.datasets[0].debug_dataset = True
    state = random.getstate()
    alone = flips_and_captions(patched, group, workers=0)
    assert random.getstate() == state
    assert flips_and_captions(patched, group, workers=2) == alone
    assert flips_and_captions(patched, group, workers=3, persistent=True) == alone
    assert 0.25 < sum(sum(f) for f in alone[0]) / sum(len(f) for f in alone[0]) < 0.75
    assert len(set(alone[0])) > 1
    captions = [caption for batch in alone[1] for caption in batch]
    assert len(set(captions)) > len(group.datasets[0].image_data)


def test_images_without_a_bucket_are_skipped_by_name(patched, tmp_path, caplog):
    config = group_config(tmp_path, count=6)
    config["datasets"][0]["bucket_no_upscale"] = True
    (tmp_path / "a" / "broken.png").write_bytes(b"no picture")
    write_images(tmp_path / "a", [(50, 1000)], prefix="narrow")
    with caplog.at_level("INFO", logger="kohya_bucket"):
        group, _ = build_groups(patched, config)
    dataset = group.datasets[0]
    log = caplog.text
    assert "2 images will not be trained" in log
    assert "broken.png" in log
    assert "narrow_000.png: 50x1000: a side is shorter than one bucket step" in log
    assert not any("broken" in key or "narrow" in key for key in dataset.image_data)
    assert group.num_train_images == len(dataset.image_data)
    assert_exact(train(patched, group, epochs=2), group)


def test_validation_sets(patched, tmp_path):
    config = group_config(tmp_path)
    if not hasattr(patched.config_util.BaseDatasetParams(), "validation_split"):
        pytest.skip("this version has no validation split")
    config["datasets"][0].update(validation_split=0.25, validation_seed=5)
    group, validation = build_groups(patched, config)
    trained, held_out = set(group.image_data), set(validation.image_data)
    assert not trained & held_out
    assert len(trained | held_out) == 41
    epoch = multiprocessing.Value("i", 0)
    validation.datasets[0].debug_dataset = True
    collator = patched.train_util.collator_class(epoch, epoch, validation)
    loader = torch.utils.data.DataLoader(validation, shuffle=False, batch_size=1, collate_fn=collator)
    passes = []
    for number in (1, 2):
        epoch.value = number
        passes.append([tuple(batch["image_keys"]) for batch in loader])
    assert passes[0] == passes[1]
    assert sorted(k for batch in passes[0] for k in batch) == sorted(held_out)


def test_without_a_validation_seed_sd_scripts_splits_overlap(unpatched, tmp_path):
    """Documented, not mended: both halves are drawn separately. If this ever fails, sd-scripts has mended it."""
    config = group_config(tmp_path)
    if not hasattr(unpatched.config_util.BaseDatasetParams(), "validation_split"):
        pytest.skip("this version has no validation split")
    config["datasets"][0].update(validation_split=0.25)
    group, validation = build_groups(unpatched, config)
    assert set(group.image_data) & set(validation.image_data)


def test_an_arbitrary_dataset_class_is_left_alone(patched):
    class Own(patched.train_util.MinimalDataset):
        def __init__(self):
            super().__init__((64, 64), 1.0)

        def __len__(self):
            return 5

        def __getitem__(self, index):
            return index

    epoch = multiprocessing.Value("i", 1)
    if "tokenizer" in patched.train_util.MinimalDataset.__init__.__code__.co_varnames:
        pytest.skip("this version's MinimalDataset needs a tokenizer")
    loader = loader_of(patched, Own(), epoch)
    assert isinstance(loader.sampler, torch.utils.data.RandomSampler)
    assert sorted(loader) == list(range(5))


def test_windows_paths_and_names(patched, tmp_path):
    """Unicode, spaces, upper-case extensions: the names that people have."""
    folder = tmp_path / "Фото (1) 猫"
    paths = write_images(folder, random_sizes(4, 9, 60, 300))
    os.rename(paths[0], folder / "UPPER CASE.PNG")
    config = group_config(tmp_path)
    config["datasets"][0]["subsets"] = [{"image_dir": str(folder), "class_tokens": "x"}]
    group, _ = build_groups(patched, config)
    assert len(group.image_data) == 4
    assert_exact(train(patched, group, epochs=2), group)
