"""Caching without strategies, as sd-scripts until 0.9 does it, over images of which some cannot be read."""

from types import SimpleNamespace

import pytest
from PIL import Image

from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.caching.readable import cache_the_readable_plainly


def dataset_of(folder, n):
    infos = {}
    for number in range(n):
        path = folder / f"{number}.png"
        Image.new("RGB", (8 + number, 8)).save(path)
        infos[str(path)] = SimpleNamespace(
            image_key=str(path), absolute_path=str(path), bucket_reso=(64, 64), latents_npz=None, latents=None
        )
    return SimpleNamespace(image_data=infos)


def caching(dataset, runs, fails=None):
    """sd-scripts' loop: loads each image when its turn comes."""

    def cache():
        asked = [info for info in dataset.image_data.values() if info.latents_npz is None]
        runs.append(len(asked))
        for info in asked:
            with Image.open(info.absolute_path) as image:
                image.load()
            if fails is not None:
                raise fails
            info.latents = "cached"

    return cache


def test_what_is_no_images_fault_ends_caching_at_once(tmp_path, caplog):
    """No memory for the VAE, a NaN: looking through all images for a culprit takes hours, and may find another one."""
    dataset, runs = dataset_of(tmp_path, 3), []
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:40])
    error = RuntimeError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        cache_the_readable_plainly(dataset, caching(dataset, runs, error), AdapterOptions())
    assert runs == [3]
    assert "left out" not in caplog.text


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_too_many_pixels_is_left_out_too(tmp_path, monkeypatch, caplog):
    dataset, runs = dataset_of(tmp_path, 4), []
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 80 // 2)  # the last has 88, and more than twice as many are refused
    cache_the_readable_plainly(dataset, caching(dataset, runs), AdapterOptions())
    assert runs == [4, 0]
    assert [info.latents for info in dataset.image_data.values()] == ["cached", "cached", "cached", None]
    assert "3.png is left out" in caplog.text
