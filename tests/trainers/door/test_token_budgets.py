"""Batch sizes by a model's tokens and their cost, for images and for clips."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kohya_bucket.latents.token_grids import TOKEN_GRIDS
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placing import place_images
from kohya_bucket.trainers.musubi.batches import CachedItems


@pytest.mark.parametrize(
    ("model", "size", "frames", "tokens"),
    [
        ("flux", (1024, 1024), 1, 64 * 64),
        ("flux", (1000, 512), 1, 63 * 32),  # a part of a patch is one
        ("hunyuan-image", (2048, 2048), 1, 64 * 64),
        ("wan-1.3b", (832, 480), 81, 52 * 30 * 21),
        ("hunyuan-video", (960, 544), 1, 60 * 34),
        ("z-image", (1024, 1024), 5, 64 * 64 * 5),
    ],
)
def test_tokens_of_an_image_or_a_clip(model, size, frames, tokens):
    assert TOKEN_GRIDS[model].tokens([size], [frames]).tolist() == [tokens]


def batches(images, table):
    planner = GroupPlanner([images], AdapterOptions.from_tables(("here", table)))
    return planner.planner(1).global_batch.tolist()


def test_the_trainers_batch_size_gives_way_to_a_budget():
    sizes = np.array([(1024, 1024), (1216, 832), (1024, 1024)], dtype=np.int32)
    keys = DatasetKeys((1024, 1024), True, 256, 2048)
    images = place_images(list("abc"), sizes, np.ones(3, dtype=int), 4, keys, AdapterOptions()).trained
    assert images.buckets == [(1024, 1024), (1216, 832)]
    assert batches(images, {"model": "flux"}) == [4, 4]
    assert batches(images, {"model": "flux", "max_tokens": 8000}) == [1, 2]


def test_clips_of_musubi_tuner_count_their_frames():
    """An image may have a number in the third place of its bucket too: FramePack's and Wan's window."""
    keys = [(480, 832, 33), (480, 832, 81), (480, 832, 9), (480, 832, 1024, 1024)]
    items = [SimpleNamespace(latent_cache_path=f"{i}", frame_count=n) for i, n in enumerate((33, 81, None, None))]
    buckets = {key: [item] for key, item in zip(keys, items, strict=True)}
    manager = SimpleNamespace(buckets=buckets, batch_size=1)
    clips = CachedItems.from_dataset(SimpleNamespace(batch_manager=manager, resolution=(832, 480)))
    found = dict(zip(clips.bucket_keys, clips.frames, strict=True))
    assert [found[key] for key in keys] == [33, 81, 1, 1]
    counted = batches(clips, {"model": "wan-14b", "max_tokens": 33_000})
    assert dict(zip(clips.bucket_keys, counted, strict=True)) == dict(zip(keys, [2, 1, 21, 21], strict=True))


def test_the_page_names_all_models():
    page = (Path(__file__).parents[3] / "docs/sd-scripts.md").read_text(encoding="utf-8")
    listed = page.split("`model` is one of ", 1)[1].split("SD 1.5", 1)[0]
    assert re.findall("`([^`]+)`", listed) == list(TOKEN_GRIDS)
