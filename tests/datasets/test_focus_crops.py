"""`BucketedDataset(focus=...)`: what is marked is in the pixels, and the rest is as without it."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from kohya_bucket import BucketedDataset, KohyaBucketError
from kohya_bucket.buckets.focus import focused
from kohya_bucket.buckets.rules.fixed import OneBucket
from kohya_bucket.latents.encode.precompute import _images_of

COUNT, SIDE = 20, 64
RULE = OneBucket((SIDE, SIDE))


@pytest.fixture
def marked(tmp_path):
    """(paths, focus, pixels of each rectangle): black pictures, white where they are marked, which need no resize."""
    rng = np.random.default_rng(1)
    paths, focus, areas = [], [], []
    for i in range(COUNT):
        long, width, height = (int(n) for n in rng.integers((80, 5, 5), (200, 60, 60)))
        size = (SIDE, long) if i % 2 else (long, SIDE)
        left, top = int(rng.integers(0, size[0] - width + 1)), int(rng.integers(0, size[1] - height + 1))
        pixels = np.zeros((size[1], size[0], 3), np.uint8)
        pixels[top : top + height, left : left + width] = 255
        paths.append(tmp_path / f"{i}.png")
        Image.fromarray(pixels).save(paths[-1])
        focus.append((left / size[0], top / size[1], (left + width) / size[0], (top + height) / size[1]))
        areas.append(width * height)
    return paths, np.array(focus), areas


def white(dataset):
    return [int((item["image"][0] > 0).sum()) for item in dataset]


def test_every_rectangle_is_whole(marked, tmp_path) -> None:
    paths, focus, areas = marked
    rows = zip(paths, focus.tolist(), strict=True)
    file = tmp_path / "focus.jsonl"
    file.write_text("".join(json.dumps({"image": path.name, "focus": box}) + "\n" for path, box in rows))
    plain, dataset = BucketedDataset(paths, RULE), BucketedDataset(paths, RULE, focus=focus)
    assert white(dataset) == white(BucketedDataset(paths, RULE, focus=file)) == areas
    assert sum(one < area for one, area in zip(white(plain), areas, strict=True)) > COUNT / 3
    placement = focused(RULE.place(dataset.sizes), focus)
    assert np.allclose([item["crop_ltrb"].numpy() for item in dataset], placement.crop_ltrb)
    assert np.array_equal(_images_of(dataset)[1].cuts, placement.cuts)  # what latents are encoded from


def test_without_rectangles_items_are_the_same_to_the_bit(marked) -> None:
    paths = marked[0]
    none = BucketedDataset(paths, RULE, focus=np.full((COUNT, 4), np.nan))
    for one, other in zip(none, BucketedDataset(paths, RULE), strict=True):
        assert torch.equal(one["image"], other["image"])
        assert torch.equal(one["crop_ltrb"], other["crop_ltrb"])


@pytest.mark.parametrize("focus", [np.zeros((3, 4)), np.full((COUNT, 4), 2.0), [[0.5, 0, 0.1, 1]] * COUNT, "nowhere"])
def test_what_is_no_focus_is_refused(marked, focus) -> None:
    with pytest.raises(KohyaBucketError, match="focus"):
        BucketedDataset(marked[0], RULE, focus=focus)
