"""What sd-scripts does without the adapter. If one of these fails, sd-scripts has mended it: then mend the README.

The images it misses are counted in `benchmarks/epochs.py`.
"""

import multiprocessing

import numpy as np
import pytest
import torch
from PIL import Image
from sdscripts_support import build_groups, write_images
from test_sdscripts_epochs import group_config, loader_of


def test_workers_draw_the_same_flips(unpatched, tmp_path):
    config = group_config(tmp_path, count=64, flip_aug=True)
    config["datasets"][0]["enable_bucket"] = False
    write_images(tmp_path / "a", [(128, 128)] * 64)
    group, _ = build_groups(unpatched, config)
    flips = [
        tuple(batch["flippeds"]) for batch in loader_of(unpatched, group, multiprocessing.Value("i", 1), workers=2)
    ]
    # A worker's first batch is drawn before it is told the epoch; then each seeds itself with the same number.
    assert flips[2::2] == flips[3::2]
    assert len(set(flips[2:])) > 1


def test_an_image_shorter_than_a_step_ends_in_a_division_by_zero(unpatched, tmp_path):
    config = group_config(tmp_path, count=3)
    config["datasets"][0]["bucket_no_upscale"] = True
    write_images(tmp_path / "a", [(50, 1000)], prefix="narrow")
    with pytest.raises(ZeroDivisionError):
        build_groups(unpatched, config)


@pytest.mark.parametrize("cut_off", [False, True])
def test_an_unreadable_image_ends_the_run(unpatched, tmp_path, cut_off):
    config = group_config(tmp_path, count=1)
    for i in range(12):  # several, since an epoch may miss one
        broken = tmp_path / "a" / f"broken_{i}.png"
        if cut_off:
            noise = np.random.default_rng(i).integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(noise).save(broken)
        broken.write_bytes(broken.read_bytes()[:2000] if cut_off else b"no picture")

    def train():
        group, _ = build_groups(unpatched, config)
        list(loader_of(unpatched, group, multiprocessing.Value("i", 1)))

    with pytest.raises(Exception, match="truncated" if cut_off else "cannot identify image file|division"):
        train()


def strategy_of(unpatched):
    from library import strategy_sd

    return strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 1, False)


def test_latents_of_another_image_lend_their_size(unpatched, tmp_path):
    strategy = strategy_of(unpatched)
    folder = tmp_path / "a"
    write_images(folder, [(200, 100)], prefix="img")
    (folder / "img_000.png").rename(folder / "img_1.png")
    write_images(folder, [(100, 300)], prefix="img")
    (folder / "img_000.png").rename(folder / "img_10.png")
    np.savez(folder / "img_10_0100x0300_sd.npz", latents=np.zeros((4, 1, 1)))
    config = group_config(tmp_path, count=0)
    from library import strategy_base

    before = strategy_base.LatentsCachingStrategy._strategy
    strategy_base.LatentsCachingStrategy._strategy = strategy
    try:
        group, _ = build_groups(unpatched, config)
    finally:
        strategy_base.LatentsCachingStrategy._strategy = before
    sizes = {key.rpartition("/")[2]: tuple(info.image_size) for key, info in group.datasets[0].image_data.items()}
    assert sizes["img_1.png"] == (100, 300)


def test_latents_of_another_resolution_and_of_an_edited_image_are_believed(unpatched, tmp_path):
    strategy = strategy_of(unpatched)
    image, npz = tmp_path / "a.png", str(tmp_path / "a_0064x0064_sd.npz")
    Image.new("RGB", (64, 64)).save(image)
    strategy.save_latents_to_disk(npz, torch.zeros(4, 8, 8), (64, 64), (0, 0, 64, 64), None, None)
    Image.new("RGB", (64, 64), "white").save(image)
    for bucket in ((64, 64), (512, 512), (128, 64)):
        assert strategy.is_disk_cached_latents_expected(bucket, npz, False, False)


def test_half_written_latents_end_the_run(unpatched, tmp_path):
    strategy = strategy_of(unpatched)
    npz = tmp_path / "a_0064x0064_sd.npz"
    strategy.save_latents_to_disk(str(npz), torch.zeros(4, 8, 8), (64, 64), (0, 0, 64, 64), None, None)
    npz.write_bytes(npz.read_bytes()[:300])
    with pytest.raises(Exception, match=r"zip|truncated|File"):
        strategy.is_disk_cached_latents_expected((64, 64), str(npz), False, False)
