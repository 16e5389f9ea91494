"""Alpha masks are trained with where they were asked for, whatever lies in a cache."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sdscripts_support import MeanVAE, build_groups, cache_latents

COUNT = 5


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "a").mkdir()
    for i in range(COUNT):
        pixels = rng.integers(0, 255, (128, 128, 4), dtype=np.uint8)
        pixels[..., 3] = 40 * i + 10
        Image.fromarray(pixels).save(tmp_path / "a" / f"{i}.png")
    return tmp_path / "a"


def cache(sd, folder, wishes, table=None):
    """One run's caching, a dataset for each of `wishes`; (images encoded, the group, ready to train)."""
    keys = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64}
    datasets = [
        {**keys, "subsets": [{"image_dir": str(folder), "class_tokens": f"set {k}", "num_repeats": 4, **subset}]}
        for k, subset in enumerate(wishes)
    ]
    group, _ = build_groups(sd, {"datasets": datasets, **({"kohya_bucket": table} if table else {})})
    encoder = MeanVAE()
    cache_latents(group, encoder)
    return encoder.encoded, group


def batches(sd, group, workers=0):
    for dataset in group.datasets:
        dataset.debug_dataset = True
    epoch = multiprocessing.Value("i", 1)
    collator = sd.train_util.collator_class(epoch, epoch, group)
    return list(
        torch.utils.data.DataLoader(group, batch_size=1, shuffle=True, collate_fn=collator, num_workers=workers)
    )


def assert_masks(batch, wanted):
    """All masks of a batch, where they are wanted, are those of its images; else there are none."""
    if not wanted:
        assert batch["alpha_masks"] is None
        return
    for key, mask in zip(batch["image_keys"], batch["alpha_masks"], strict=True):
        torch.testing.assert_close(mask, torch.full((128, 128), (40 * int(Path(key).stem) + 10) / 255))


def test_sd_scripts_trains_with_a_mask_that_was_left_in_a_cache(unpatched, folder):
    cache(unpatched, folder, [{"alpha_mask": True}])
    encoded, group = cache(unpatched, folder, [{"alpha_mask": False}])
    assert encoded == 0
    for batch in batches(unpatched, group):
        assert_masks(batch, True)


@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_a_mask_that_was_left_in_a_cache_is_not_trained_with(patched, folder, tmp_path, kind):
    table = table_of(kind, tmp_path)
    assert cache(patched, folder, [{"alpha_mask": True}], table)[0] == COUNT
    for mask in (False, True):
        encoded, group = cache(patched, folder, [{"alpha_mask": mask}], table)
        assert encoded == 0
        for batch in batches(patched, group, workers=2):
            assert_masks(batch, mask)


@pytest.mark.parametrize("kind", ["npz", "shards"])
@pytest.mark.parametrize(
    ("wishes", "counts"),
    [
        ([{"flip_aug": True}, {"alpha_mask": True}], (15, 0)),
        ([{"alpha_mask": True}, {"flip_aug": True}], (15, 0)),
        ([{}, {"alpha_mask": True}, {"flip_aug": True}], (20, 0)),
        ([{"flip_aug": True, "alpha_mask": True}, {}, {"flip_aug": True}], (10, 0)),
    ],
    ids=["flip+mask", "mask+flip", "none+mask+flip", "both+none+flip"],
)
def test_data_sets_that_want_different_things_of_one_image(
    patched, folder, tmp_path, kind, wishes, counts
):  # fmt: skip
    table = table_of(kind, tmp_path)
    for count in counts:
        encoded, group = cache(patched, folder, wishes, table)
        assert encoded == count
        seen = {k: set() for k in range(len(wishes))}
        for batch in batches(patched, group):
            k = int(batch["captions"][0].split()[-1])
            assert_masks(batch, wishes[k].get("alpha_mask", False))
            for key, latent, flipped in zip(batch["image_keys"], batch["latents"], batch["flippeds"], strict=True):
                picture = torch.from_numpy(np.asarray(Image.open(key).convert("RGB")).copy()).permute(2, 0, 1)
                picture = (picture.flip(2) if flipped else picture)[None, :1] / 127.5 - 1
                want = torch.nn.functional.avg_pool2d(picture, 8)[0].expand(4, -1, -1)
                assert torch.allclose(latent, want, atol=1e-5)
                seen[k].add(bool(flipped))
        assert seen == {k: {True, False} if subset.get("flip_aug") else {False} for k, subset in enumerate(wishes)}


@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_data_sets_that_write_the_folder_in_different_ways(
    patched, folder, tmp_path, kind, monkeypatch
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    wishes = [{"alpha_mask": True}, {"flip_aug": True, "image_dir": folder.name}]
    for count in (15, 0):
        encoded, group = cache(patched, folder, wishes, table_of(kind, tmp_path))
        assert encoded == count
        for batch in batches(patched, group):
            assert_masks(batch, batch["captions"][0] == "set 0")


def test_subsets_of_one_batch_that_differ(patched, folder, tmp_path):
    """Without latents in a cache sd-scripts looks at the subset itself: nothing changes there."""
    other = tmp_path / "b"
    other.mkdir()
    for path in folder.glob("*.png"):
        Image.open(path).save(other / f"{int(path.stem) + COUNT}.png")
    subsets = [{"image_dir": str(folder), "alpha_mask": True}, {"image_dir": str(other), "alpha_mask": False}]
    config = {
        "datasets": [
            {"resolution": 128, "batch_size": 4, "enable_bucket": True, "min_bucket_reso": 64, "subsets": subsets}
        ]
    }
    group, _ = build_groups(patched, config)
    found = {}
    for batch in batches(patched, group):
        masks = batch["alpha_masks"]
        for i, key in enumerate(batch["image_keys"]):
            found[int(Path(key).stem)] = 1.0 if masks is None else float(masks[i].mean())
    want = {i: (40 * i + 10) / 255 for i in range(COUNT)} | {i + COUNT: 1.0 for i in range(COUNT)}
    assert found == pytest.approx(want)


def test_one_file_per_image_is_refused_where_only_one_data_set_wants_masks(patched, folder):
    if not hasattr(patched.train_util.BaseDataset, "cache_latents"):
        pytest.skip("this version caches by its strategies only")
    datasets = [
        {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64,
         "subsets": [{"image_dir": str(folder), "class_tokens": "x", "alpha_mask": mask}]}
        for mask in (True, False)
    ]  # fmt: skip
    group, _ = build_groups(patched, {"datasets": datasets})
    with pytest.raises(SystemExit, match=r"datasets 1 and 2 both have .*, with alpha_mask and without, but this way"):
        group.cache_latents(MeanVAE(), 2, True, True)


def table_of(kind, tmp_path):
    if kind == "npz":
        return None
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    return {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")}
