"""Masks of a batch by what the subsets of its images ask for."""

from types import SimpleNamespace

import pytest
import torch

from kohya_bucket.trainers.sdscripts.batches import drop_unwanted_masks

KEYS = ["a", "b", "c"]


def subsets(*wanted: bool) -> dict[str, SimpleNamespace]:
    return {key: SimpleNamespace(alpha_mask=yes) for key, yes in zip(KEYS, wanted, strict=True)}


def test_unwanted_masks_count_whole_beside_wanted_ones() -> None:
    masks = torch.rand(3, 4, 5)
    batch = {"alpha_masks": masks, "latents": 1}
    found = drop_unwanted_masks(batch, KEYS, subsets(True, False, True))
    assert torch.equal(found["alpha_masks"][[0, 2]], masks[[0, 2]])
    assert torch.equal(found["alpha_masks"][1], torch.ones(4, 5))
    assert batch["alpha_masks"] is masks
    assert not torch.equal(masks[1], torch.ones(4, 5))


def test_nothing_is_left_where_nobody_wants_masks() -> None:
    batch = {"alpha_masks": torch.rand(3, 4, 5), "latents": 1}
    assert drop_unwanted_masks(batch, KEYS, subsets(False, False, False)) == {"alpha_masks": None, "latents": 1}


@pytest.mark.parametrize("batch", [{"alpha_masks": None}, {"latents": 1}, ["no dict"]])
def test_batches_without_masks_pass(batch: object) -> None:
    assert drop_unwanted_masks(batch, KEYS, subsets(False, True, False)) is batch


def test_wanted_masks_pass() -> None:
    batch = {"alpha_masks": torch.rand(3, 4, 5)}
    assert drop_unwanted_masks(batch, KEYS, subsets(True, True, True)) is batch
