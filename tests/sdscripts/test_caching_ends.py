"""A caching call of sd-scripts that ends half-way, with stand-ins for its objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")

from kohya_bucket.latents.npz import ARCHITECTURES
from kohya_bucket.latents.store import LatentStore
from kohya_bucket.sdscripts.caching import cache_latents
from kohya_bucket.sdscripts.settings import AdapterSettings

ARCH = ARCHITECTURES["sdxl"]


class Strategy:
    cache_suffix = ARCH.suffix
    cache_to_disk = True
    skip_disk_cache_validity_check = False


class Dataset(SimpleNamespace):
    """As sd-scripts' own, it can be referred to weakly."""


def dataset_in(folder: Path, names: list[str]) -> Dataset:
    data = {}
    for name in names:
        Image.new("RGB", (64, 64)).save(folder / name)
        data[name] = SimpleNamespace(
            image_key=name, absolute_path=str(folder / name), bucket_reso=(64, 64), image_size=(64, 64),
            resized_size=(64, 64), resize_interpolation=None,
        )  # fmt: skip
    subset = SimpleNamespace(flip_aug=False, alpha_mask=False)
    return Dataset(image_data=data, image_to_subset=dict.fromkeys(names, subset), width=64, height=64)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_encoded_before_an_interrupt_is_in_the_store(tmp_path: Path, error: type[BaseException]) -> None:
    strategy = Strategy()
    dataset = dataset_in(tmp_path, ["a.png", "b.png", "c.png"])

    def ends_half_way(data: Dataset, model: object, accelerator: object) -> None:
        for info in list(data.image_data.values())[:2]:
            path = strategy.get_latents_npz_path(info.absolute_path, info.image_size)
            assert not strategy.is_disk_cached_latents_expected(info.bucket_reso, path, False, False)
            strategy.save_latents_to_disk(path, np.zeros(ARCH.shape((64, 64)), np.float32), (64, 64), (0, 0, 64, 64))
        raise error

    settings = AdapterSettings(latent_cache="shards", latent_cache_dir=str(tmp_path / "store"))
    with pytest.raises(error):
        cache_latents(dataset, ends_half_way, strategy, None, None, settings)
    assert LatentStore(tmp_path / "store").strings("source") == ["a.png", "b.png"]
    assert not vars(strategy)  # its methods are its own again
