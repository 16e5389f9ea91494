"""A planned batch is what unmodified sd-scripts makes of the same images: every key, every value."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
from sdscripts_support import build_groups, random_sizes, write_images
from test_sdscripts_epochs import loader_of

from kohya_bucket.trainers import sdscripts

OFFSETS = (-0.5, None, 0.25)


def config_of(sd, tmp_path, **more):
    subsets = []
    for number, offset in enumerate(OFFSETS):
        folder = tmp_path / f"set {number}"
        for i, path in enumerate(write_images(folder, random_sizes(5, number, 60, 300))):
            path.with_suffix(".txt").write_text(f"number {number}.{i}, one, two, three", encoding="utf-8")
        subset = {"image_dir": str(folder), "caption_extension": ".txt", "num_repeats": number + 1, **more}
        if offset is not None and hasattr(sd.config_util.BaseSubsetParams(), "custom_attributes"):
            subset["custom_attributes"] = {"timestep_sampling": {"offset": offset}, "other": [number]}
        subsets.append(subset)
    keys = {"resolution": 128, "batch_size": 3, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 256}
    return {"datasets": [{**keys, "subsets": subsets}]}


def planned(sd, config):
    """(names of the images, seed, batch) of an epoch by the plan."""
    sdscripts.install()
    try:
        group, _ = build_groups(sd, config)
        names = list(group.datasets[0].image_data)
        loader = loader_of(sd, group, multiprocessing.Value("i", 1))
        indices = list(loader.sampler)
        # none is weighed otherwise: the plan is for one process
        return [([names[i] for i in index.images.tolist()], index.seed, group[index]) for index in indices]
    finally:
        sdscripts.uninstall()


def unmodified(sd, config):
    """Makes a batch of images by name and seed, as sd-scripts alone does."""
    group, _ = build_groups(sd, config)
    dataset = group.datasets[0]

    def batch_of(names, seed):
        dataset.bucket_manager.buckets = [names]
        dataset.buckets_indices = [sd.train_util.BucketBatchIndex(0, len(names), 0)]
        random.seed(seed)
        return dataset[0]

    return batch_of


def assert_same(found, want, where):
    if isinstance(want, torch.Tensor):
        assert (found.dtype, found.shape) == (want.dtype, want.shape), where
        assert torch.equal(found, want), where
    elif isinstance(want, (list, tuple)):
        assert (type(found), len(found)) == (type(want), len(want)), where
        for one, other in zip(found, want, strict=True):
            assert_same(one, other, where)
    elif isinstance(want, np.ndarray):
        assert np.array_equal(found, want), where
    else:
        assert found == want, where


@pytest.mark.parametrize("more", [{}, {"flip_aug": True, "shuffle_caption": True, "random_crop": True}], ids=str)
@pytest.mark.parametrize("alpha", [False, True])
def test_every_key_of_a_planned_batch(unpatched, tmp_path, more, alpha):
    if alpha and not hasattr(unpatched.config_util.DreamBoothSubsetParams(), "alpha_mask"):
        pytest.skip("this version has no alpha masks")
    config = config_of(unpatched, tmp_path, **more, **({"alpha_mask": True} if alpha else {}))
    batches = planned(unpatched, config)
    batch_of = unmodified(unpatched, config)
    assert sum(len(names) for names, _, _ in batches) == 5 * (1 + 2 + 3)
    offsets = []
    for names, seed, found in batches:
        want = batch_of(names, seed)
        assert found.keys() == want.keys()
        for key in want:
            assert_same(found[key], want[key], key)
        offsets += [one.get("timestep_sampling", {}).get("offset") for one in found.get("custom_attributes", [])]
    if hasattr(unpatched.config_util.BaseSubsetParams(), "custom_attributes"):
        want = [offset for number, offset in enumerate(OFFSETS) for _ in range(5 * (number + 1))]
        assert sorted(offsets, key=str) == sorted(want, key=str)
