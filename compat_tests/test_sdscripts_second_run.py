"""A run that finds latents on disk, and what became of the images and files since."""

import inspect
import json

import numpy as np
import pytest
from PIL import Image
from sdscripts_support import MeanVAE, build_groups, cache_latents, part_of, random_sizes, write_images
from test_sdscripts_caching import latents_of

COUNT = 5
KEYS = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}


@pytest.fixture(params=["npz", "shards"])
def table(request, tmp_path):
    if request.param == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    return {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")} if request.param == "shards" else {}


def cache(sd, subset, table=None, skip_check=False, **keys):
    """(images encoded, the group, ready to train)."""
    config = {"datasets": [{**KEYS, **keys, "subsets": [subset]}], **({"kohya_bucket": table} if table else {})}
    group, _ = build_groups(sd, config)
    from library import strategy_sd

    strategy = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 2, skip_check)
    encoder = MeanVAE()
    cache_latents(group, encoder, strategy)
    return encoder.encoded, group


def metadata_subset(folder, paths, with_sizes):
    entries = {str(path): {"caption": path.stem} for path in paths}
    if with_sizes:
        for path in paths:
            entries[str(path)]["image_size"] = list(Image.open(path).size)
    file = folder / "meta.json"
    file.write_text(json.dumps(entries), encoding="utf-8")
    return {"metadata_file": str(file), "image_dir": str(folder / "a")}


@pytest.mark.parametrize("with_sizes", [True, False])
def test_fine_tuning_metadata(patched, tmp_path, table, with_sizes):
    """Without sizes in its metadata, sd-scripts puts a cache in the place of its image."""
    paths = write_images(tmp_path / "a", random_sizes(COUNT, 1, 100, 300))
    subset = metadata_subset(tmp_path, paths, with_sizes)
    assert cache(patched, subset, table)[0] == COUNT
    encoded, group = cache(patched, subset, table)
    assert encoded == 0
    assert {info.absolute_path for info in group.image_data.values()} == set(map(str, paths))
    assert len(latents_of(patched, group)) == COUNT
    Image.new("RGB", Image.open(paths[2]).size, (9, 9, 9)).save(paths[2])
    encoded, group = cache(patched, subset, table)
    assert encoded == 1
    np.testing.assert_allclose(latents_of(patched, group)[paths[2].name][0], 9 / 127.5 - 1, atol=1e-5)


def needs_metadata_without_images(sd):
    if "no image / " in inspect.getsource(sd.train_util.FineTuningDataset.__init__):
        pytest.skip("this version itself refuses metadata whose images are gone")


@pytest.mark.parametrize("with_sizes", [True, False])
def test_images_that_are_gone_train_from_their_caches(patched, tmp_path, table, with_sizes):
    if table.get("latent_cache") == "shards" and not with_sizes:
        pytest.skip("nothing says how large the images are")
    needs_metadata_without_images(patched)
    paths = write_images(tmp_path / "a", random_sizes(COUNT, 1, 100, 300))
    subset = metadata_subset(tmp_path, paths, with_sizes)
    _, group = cache(patched, subset, table)
    before = latents_of(patched, group)
    for path in paths:
        path.unlink()
    encoded, group = cache(patched, subset, table)
    after = latents_of(patched, group)
    assert encoded == 0
    assert after.keys() == before.keys()
    for name, (latent, _) in after.items():
        np.testing.assert_array_equal(latent, before[name][0])


def test_caches_of_sd_scripts_whose_images_are_gone(unpatched, request, tmp_path):
    needs_metadata_without_images(unpatched)
    paths = write_images(tmp_path / "a", random_sizes(COUNT, 1, 100, 300))
    subset = metadata_subset(tmp_path, paths, True)
    cache(unpatched, subset)
    for path in paths:
        path.unlink()
    patched = request.getfixturevalue("patched")
    encoded, group = cache(patched, subset)
    assert encoded == 0
    assert len(latents_of(patched, group)) == COUNT


def test_caches_that_are_not_checked_are_made_where_there_are_none(
    patched, tmp_path, table
):  # fmt: skip
    paths = write_images(tmp_path / "a", random_sizes(COUNT, 1, 100, 300))
    subset = {"image_dir": str(tmp_path / "a"), "class_tokens": "x"}
    assert cache(patched, subset, table, skip_check=True)[0] == COUNT
    encoded, group = cache(patched, subset, table, skip_check=True, resolution=192)
    assert encoded == COUNT
    assert len(latents_of(patched, group)) == COUNT
    assert cache(patched, subset, table, skip_check=True)[0] == 0
    Image.new("RGB", Image.open(paths[0]).size).save(paths[0])
    encoded, group = cache(patched, subset, table, skip_check=True)
    assert encoded == 0
    assert len(latents_of(patched, group)) == COUNT


def test_a_resolution_that_is_no_multiple_of_eight(patched, tmp_path, table):
    write_images(tmp_path / "a", [(150, 150)] * COUNT)
    subset = {"image_dir": str(tmp_path / "a"), "class_tokens": "x", "flip_aug": True, "alpha_mask": True}
    for count in (2 * COUNT, 0):
        encoded, group = cache(patched, subset, table, resolution=100, enable_bucket=False)
        assert encoded == count
    found = latents_of(patched, group)
    assert [latent.shape for latent, _ in found.values()] == [(4, 12, 12)] * COUNT


def test_arrays_of_others_in_an_old_cache_stay(patched, tmp_path):
    """sd-scripts takes `IMAGE.npz` for its own, adds the latents to it, and keeps what else is there."""
    write_images(tmp_path / "a", [(150, 150)])
    np.savez(tmp_path / "a" / "img_000.npz", pose=np.arange(5))
    assert cache(patched, {"image_dir": str(tmp_path / "a"), "class_tokens": "x"})[0] == 1
    with np.load(tmp_path / "a" / "img_000.npz") as found:
        np.testing.assert_array_equal(found["pose"], np.arange(5))
        assert part_of(found, "latents").shape == (4, 16, 16)


def test_an_image_that_was_edited_after_its_size_was_noted(patched, tmp_path, table):
    """`cache_info` notes sizes once; an image of another shape would be squeezed into the old one."""
    paths = write_images(tmp_path / "a", [(300, 100)] * COUNT)
    subset = {"image_dir": str(tmp_path / "a"), "class_tokens": "x", "cache_info": True}
    assert cache(patched, subset, table)[0] == COUNT
    assert cache(patched, subset, table)[0] == 0
    Image.new("RGB", (100, 300)).save(paths[0])
    for count in (1, 0):
        encoded, group = cache(patched, subset, table)
        assert encoded == count
        assert group.image_data[str(paths[0])].image_size == (100, 300)
        assert {name: latent.shape[1:] for name, (latent, _) in latents_of(patched, group).items()} == {
            path.name: (24, 8) if path == paths[0] else (8, 24) for path in paths
        }


def test_a_store_lies_beside_the_images(patched, tmp_path, monkeypatch, caplog):
    """Wherever training is started, the same store is found."""
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    caplog.set_level("INFO", logger="kohya_bucket")
    write_images(tmp_path / "a", random_sizes(COUNT, 1, 100, 300))
    subset = {"image_dir": str(tmp_path / "a")}
    for place, encoded in (("here", COUNT), ("there", 0)):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        assert cache(patched, subset, {"latent_cache": "shards"})[0] == encoded
        assert not list((tmp_path / place).iterdir())
    store = tmp_path / "a" / "kohya_bucket_latents"
    assert (store / "store.json").is_file()
    assert f"latents are kept in {store}" in caplog.text
