"""The adapter's placement against the real BucketManager and the real datasets."""

import json
import math
import random

import numpy as np
import pytest
from sdscripts_support import build_groups, image_table, random_sizes, write_images, write_metadata

from kohya_bucket.trainers import sdscripts
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, rule_for

SETTINGS = [
    ((512, 512), 256, 1024, 64),
    ((512, 768), 256, 1024, 64),
    ((768, 768), 256, 1024, 64),
    ((832, 1216), 512, 1536, 64),
    ((1024, 1024), 256, 2048, 64),
    ((1024, 1024), 512, 2048, 32),
    ((1024, 1024), 256, 2048, 16),
    ((1024, 1024), 128, 4096, 8),
    ((1328, 1328), 256, 2048, 16),
    ((640, 960), 64, 2048, 64),
    ((200, 200), 64, 512, 64),
    ((1000, 700), 256, 1024, 128),
]
CASES = [(s, no_upscale) for s in SETTINGS for no_upscale in (False, True)][:20]


@pytest.mark.parametrize(("setting", "no_upscale"), CASES)
def test_ten_thousand_sizes_against_the_live_manager(unpatched, setting, no_upscale):
    reso, low, high, steps = setting
    theirs = unpatched.train_util.BucketManager(no_upscale, reso, low, high, steps)
    ours = rule_for(DatasetKeys(reso, True, low, high, steps, no_upscale))
    if not no_upscale:
        theirs.make_buckets()
        assert [bucket.as_tuple() for bucket in ours.bucket_set] == theirs.predefined_resos
    rng = np.random.default_rng(sum(reso) + steps)
    sizes = np.exp(rng.uniform(math.log(24), math.log(9000), (10_000, 2))).astype(np.int32)
    exact = rng.integers(1, 24, (200, 2)) * 64
    sizes[:200] = exact
    placement = ours.place(sizes)
    compared = 0
    for i, (width, height) in enumerate(sizes.tolist()):
        try:
            reso_, resized, error = theirs.select_bucket(width, height)
        except ZeroDivisionError:
            assert not placement.placed[i]
            continue
        if min(reso_) <= 0:
            assert not placement.placed[i]
            continue
        compared += 1
        assert tuple(placement.bucket_sizes[i].tolist()) == reso_
        assert tuple(placement.resized_sizes[i].tolist()) == resized
        assert float(placement.aspect_errors[i]) == error
        assert tuple(placement.crop_ltrb[i].tolist()) == theirs.get_crop_ltrb(reso_, (width, height))
    assert compared > 4_000


def config_of(kind, tmp_path, **dataset):
    """A config of two datasets with different settings, as sd-scripts' validation takes it."""
    # No side shorter than a step after reduction: there sd-scripts divides by zero.
    sizes = random_sizes(40, 3, 150, 290)
    paths = write_images(tmp_path / "a", sizes, formats=("png", "jpg", "webp"))
    others = write_images(tmp_path / "b", random_sizes(9, 4, 150, 290), prefix="other")
    common = {"resolution": 128, "batch_size": 3, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
    if kind == "dreambooth":
        first = [{"image_dir": str(tmp_path / "a"), "num_repeats": 2, "caption_extension": ".txt"}]
        second = [
            {"image_dir": str(tmp_path / "b"), "num_repeats": 3, "class_tokens": "thing"},
            {"image_dir": str(tmp_path / "a"), "is_reg": True, "class_tokens": "kind"},
        ]
    elif kind == "finetuning":
        first = [{"image_dir": str(tmp_path / "a"), "metadata_file": str(write_metadata(tmp_path / "a.json", paths))}]
        second = [{"image_dir": str(tmp_path / "b"), "metadata_file": str(write_metadata(tmp_path / "b.json", others))}]
    else:
        write_images(tmp_path / "ca", sizes, formats=("png", "jpg", "webp"))
        write_images(tmp_path / "cb", random_sizes(9, 4, 150, 290), prefix="other")
        first = [{"image_dir": str(tmp_path / "a"), "conditioning_data_dir": str(tmp_path / "ca")}]
        second = [{"image_dir": str(tmp_path / "b"), "conditioning_data_dir": str(tmp_path / "cb")}]
        for subset in first + second:
            subset["caption_extension"] = ".txt"
    return {
        "datasets": [
            {**common, **dataset, "subsets": first},
            {**common, **dataset, "resolution": [192, 128], "batch_size": 2, "subsets": second},
        ]
    }


@pytest.mark.parametrize("no_upscale", [False, True])
@pytest.mark.parametrize("kind", ["dreambooth", "finetuning", "controlnet"])
def test_datasets_are_equal_image_by_image(unpatched, tmp_path, kind, no_upscale):
    config = config_of(kind, tmp_path, bucket_no_upscale=no_upscale)
    theirs, _ = build_groups(unpatched, config)
    sdscripts.install()
    try:
        ours, _ = build_groups(unpatched, config)
    finally:
        sdscripts.uninstall()
    assert len(ours) == len(theirs) > 0
    assert (ours.num_train_images, ours.num_reg_images) == (theirs.num_train_images, theirs.num_reg_images)
    for mine, original in zip(ours.datasets, theirs.datasets, strict=True):
        assert image_table(mine) == image_table(original)
        assert mine.bucket_info == original.bucket_info
        assert json.dumps(mine.bucket_info) == json.dumps(original.bucket_info)
        manager, reference = mine.bucket_manager, original.bucket_manager
        assert manager.resos == reference.resos
        assert manager.reso_to_id == reference.reso_to_id
        assert [sorted(b) for b in manager.buckets] == [sorted(b) for b in reference.buckets]
        assert len(mine.buckets_indices) == len(original.buckets_indices)
        assert len(mine) == len(original)


def test_without_bucketing_there_is_one_bucket(unpatched, patched, tmp_path):
    config = config_of("dreambooth", tmp_path, enable_bucket=False)
    group, _ = build_groups(patched, config)
    assert [d.bucket_manager.resos for d in group.datasets] == [[(128, 128)], [(192, 128)]]
    assert all(d.bucket_info is None for d in group.datasets)


def test_the_global_random_state_is_left_alone(patched, tmp_path):
    config = config_of("dreambooth", tmp_path)
    config["datasets"][0]["subsets"][0].update(flip_aug=True, shuffle_caption=True)
    group, _ = build_groups(patched, config)
    random.seed(7)
    before = random.getstate()
    for dataset in group.datasets:
        dataset.make_buckets()
    group.set_current_epoch(3)
    assert random.getstate() == before


def test_webp_with_alpha_is_placed_by_its_true_size(unpatched, tmp_path):
    """imagesize 1.x reads it one pixel short."""
    import imagesize
    from PIL import Image

    folder = tmp_path / "a"
    folder.mkdir()
    Image.new("RGBA", (128, 128), (1, 2, 3, 4)).save(folder / "alpha.webp", quality=90)
    Image.new("RGB", (128, 128)).save(folder / "plain.webp")
    subset = {"image_dir": str(folder), "class_tokens": "x"}
    dataset = {"resolution": 192, "enable_bucket": True, "bucket_no_upscale": True, "min_bucket_reso": 64}
    config = {"datasets": [{**dataset, "subsets": [subset]}]}
    if imagesize.get(str(folder / "alpha.webp")) != (127, 127):
        pytest.skip("this imagesize reads extended WebP right")
    theirs, _ = build_groups(unpatched, config)
    assert theirs.image_data[str(folder / "alpha.webp")].bucket_reso == (64, 64)
    sdscripts.install()
    try:
        ours, _ = build_groups(unpatched, config)
    finally:
        sdscripts.uninstall()
    assert {info.bucket_reso for info in ours.image_data.values()} == {(128, 128)}
