"""The adapter's hold on the real musubi-tuner: no name or parameter that it relies on changes unseen."""

import os

import pytest
from renaming import unseen, with_other_behaviour


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each change is tried in a fork")
def test_nothing_can_change_unseen(musubi_source, tmp_path):
    tried, missed = unseen("musubi", musubi_source.parent, tmp_path)
    assert tried > 80
    assert missed == []


def seen(source, change):
    """What is left to musubi-tuner where its code does something else under the same names."""
    found = with_other_behaviour(
        "musubi", source.parent, "from musubi_tuner.dataset import image_video_dataset as home\n" + change
    )
    assert found["active"]
    return found["left_alone"]


def test_as_it_is_all_is_known(musubi_source):
    assert seen(musubi_source, "") == {}


ROUNDED = """
chosen = home.BucketSelector.get_bucket_resolution
def get_bucket_resolution(self, image_size):
    return chosen(self, (image_size[0] + 16, image_size[1]))
home.BucketSelector.get_bucket_resolution = get_bucket_resolution
"""
OTHER_CLIPS = """
import inspect
honoured = "enable_bucket" in inspect.getsource(home.VideoDataset.retrieve_latent_cache_batches)
def retrieve_latent_cache_batches(self, num_workers):
    keys = (True, False) if honoured else (self.enable_bucket, self.bucket_no_upscale)
    self.datasource.set_bucket_selector(home.BucketSelector(self.resolution, *keys, self.architecture))
    self.get_latent_cache_path
    yield from ()
home.VideoDataset.retrieve_latent_cache_batches = retrieve_latent_cache_batches
"""
OTHER_CUT = """
from kohya_bucket.trainers.door.patching import bindings_of
original = home.resize_image_to_bucket
def resize_image_to_bucket(image, bucket_reso):
    return original(image[:, 1:], bucket_reso)
for module, name in list(bindings_of(original, lambda module: module.__name__.startswith("musubi_tuner"))):
    setattr(module, name, resize_image_to_bucket)
"""


def test_other_buckets_are_noticed(musubi_source):
    assert "BucketSelector makes (" in seen(musubi_source, ROUNDED)["planning"]


def test_other_buckets_of_clips_are_noticed(musubi_source):
    """What happened with enable_bucket in 0.3.6: no name changed."""
    left = seen(musubi_source, OTHER_CLIPS)
    assert list(left) == ["planning"]
    assert "VideoDataset.retrieve_latent_cache_batches makes (" in left["planning"]


def test_other_pixels_are_noticed(musubi_source):
    assert "resize_image_to_bucket makes pixels" in seen(musubi_source, OTHER_CUT)["caching"]
