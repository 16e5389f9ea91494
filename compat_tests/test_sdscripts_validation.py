"""Validation batches: every image that is held back, and what the trainer's epoch says of captions."""

import multiprocessing

import pytest
import torch
from sdscripts_support import build_groups, random_sizes, write_images

from kohya_bucket.trainers import sdscripts

KEYS = {"resolution": 128, "batch_size": 4, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
SPLIT = {"validation_split": 0.3, "validation_seed": 1}


@pytest.fixture(autouse=True)
def needs_validation(unpatched):
    if not hasattr(unpatched.train_util, "split_train_val"):
        pytest.skip("this version has no validation datasets")


def validation_loader(sd, group, workers=0):
    """(the trainer's epoch, its loader of validation batches)."""
    for dataset in group.datasets:
        dataset.debug_dataset = True
    epoch = multiprocessing.Value("i", 0)
    collator = sd.train_util.collator_class(epoch, multiprocessing.Value("i", 0), group)
    return epoch, torch.utils.data.DataLoader(
        group, batch_size=1, shuffle=False, collate_fn=collator, num_workers=workers
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_captions_are_left_out_in_the_epochs_that_say_so(patched, tmp_path, workers):
    write_images(tmp_path / "a", random_sizes(20, 1, 100, 300))
    subset = {"image_dir": str(tmp_path / "a"), "caption_extension": ".txt", "caption_dropout_every_n_epochs": 2}
    _, group = build_groups(patched, {"datasets": [{**KEYS, **SPLIT, "subsets": [subset]}]})
    epoch, loader = validation_loader(patched, group, workers)
    orders = []
    for epoch.value in (1, 2, 3):
        batches = list(loader)
        assert [bool(c) for b in batches for c in b["captions"]] == [epoch.value % 2 == 1] * 6
        orders.append([key for batch in batches for key in batch["image_keys"]])
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("remainder", ["keep", "pad", "drop", "merge", "catch_all"])
def test_every_image_is_validated(patched, tmp_path, remainder):
    write_images(tmp_path / "a", random_sizes(20, 1, 100, 300))
    subset = {"image_dir": str(tmp_path / "a"), "caption_extension": ".txt"}
    config = {"kohya_bucket": {"remainder": remainder}, "datasets": [{**KEYS, **SPLIT, "subsets": [subset]}]}
    _, group = build_groups(patched, config)
    _, loader = validation_loader(patched, group)
    seen = [key for batch in loader for key in batch["image_keys"]]
    assert set(seen) == set(group.image_data)
    assert len(loader) > 0
    if remainder != "pad":
        assert len(seen) == 6


@pytest.mark.parametrize("adapter", [False, True])
def test_a_data_set_of_which_nothing_is_held_back(unpatched, tmp_path, adapter):
    for name in ("a", "regular"):
        write_images(tmp_path / name, random_sizes(9, 1, 100, 300))
    subsets = [{"image_dir": str(tmp_path / "a")}, {"image_dir": str(tmp_path / "regular"), "is_reg": True}]
    config = {"datasets": [{**KEYS, **SPLIT, "subsets": [{**subset, "class_tokens": "x"}]} for subset in subsets]}
    if adapter:
        sdscripts.install()
    try:
        _, group = build_groups(unpatched, config)
        _, loader = validation_loader(unpatched, group)
        assert sum(len(batch["image_keys"]) for batch in loader) == 3
        assert [len(dataset) > 0 for dataset in group.datasets] == [True, False]
    finally:
        sdscripts.uninstall()
