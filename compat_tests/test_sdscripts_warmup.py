"""Captions that grow with the trainer's step (`token_warmup_step`) do so in every worker."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from sdscripts_support import build_groups, write_images

WARM = 10


def tags_by_epoch(sd, tmp_path, workers, control=False):
    """Words of each caption in two epochs; the trainer counts a step for each batch, from the first batch on."""
    write_images(tmp_path / "a", [(128, 128)] * 12)
    keys = {"resolution": 128, "batch_size": 1, "enable_bucket": True, "min_bucket_reso": 64}
    subset = {"image_dir": str(tmp_path / "a"), "caption_extension": ".txt", "token_warmup_min": 1,
              "token_warmup_step": WARM}  # fmt: skip
    if control:
        write_images(tmp_path / "c", [(128, 128)] * 12)
        subset["conditioning_data_dir"] = str(tmp_path / "c")
    group, _ = build_groups(sd, {"datasets": [{**keys, "subsets": [subset]}]})
    epoch, step = (multiprocessing.Value("i", 0) for _ in range(2))
    collator = sd.train_util.collator_class(epoch, step, group)
    loader = torch.utils.data.DataLoader(group, batch_size=1, shuffle=True, collate_fn=collator, num_workers=workers)
    found = []
    for epoch.value in (1, 2):
        words = []
        for batch in loader:
            words += [len(caption.split(",")) for caption in batch["captions"]]
            step.value += 1
        found.append(words)
    return SimpleNamespace(first=found[0], second=found[1])


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("control", [False, True], ids=["images", "ControlNet"])
def test_captions_grow_once(patched, tmp_path, workers, control):
    words = tags_by_epoch(patched, tmp_path, workers, control)
    assert words.first[0] == 1
    assert words.first == sorted(words.first)
    assert words.second == [4] * 12


def test_in_sd_scripts_each_workers_first_batch_begins_again(unpatched, tmp_path):
    assert tags_by_epoch(unpatched, tmp_path, 3).second.count(1) == 3


def test_in_sd_scripts_a_controlnet_set_is_never_told_the_step(unpatched, tmp_path):
    assert tags_by_epoch(unpatched, tmp_path, 0, control=True).second == [1] * 12
