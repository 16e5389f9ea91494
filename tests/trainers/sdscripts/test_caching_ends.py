"""A caching call of sd-scripts that ends half-way, with stand-ins for its objects."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")

from kohya_bucket.errors import KohyaBucketError  # noqa: E402
from kohya_bucket.latents.store.latent_store import LatentStore  # noqa: E402
from kohya_bucket.trainers.door.options import AdapterOptions  # noqa: E402
from kohya_bucket.trainers.sdscripts.caching.latents import cache_latents  # noqa: E402
from kohya_bucket.trainers.sdscripts.caching.readable import cache_the_readable  # noqa: E402
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES  # noqa: E402
from kohya_bucket.trainers.sdscripts.npz.names import npz_path  # noqa: E402

ARCH = ARCHITECTURES["sdxl"]


class Strategy:
    cache_suffix = ARCH.suffix
    cache_to_disk = True
    skip_disk_cache_validity_check = False

    def get_latents_npz_path(self, absolute_path: str, image_size: tuple[int, int]) -> str:
        return str(npz_path(absolute_path, image_size, ARCH))

    def load_latents_from_disk(self, npz_path: str, bucket_reso: tuple[int, int]) -> tuple[np.ndarray]:
        with np.load(npz_path) as file:
            return (file["latents"],)


class Dataset(SimpleNamespace):
    """As sd-scripts' own, it can be referred to weakly."""


def dataset_in(folder: Path, names: list[str]) -> Dataset:
    data = {}
    for name in names:
        Image.new("RGB", (64, 64)).save(folder / name)
        data[name] = SimpleNamespace(
            image_key=name, absolute_path=str(folder / name), bucket_reso=(64, 64), image_size=(64, 64),
            resized_size=(64, 64), resize_interpolation=None, image=None, latents_npz=None,
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

    settings = AdapterOptions(latent_cache="shards", latent_cache_dir=str(tmp_path / "store"))
    with pytest.raises(error):
        cache_latents(dataset, ends_half_way, strategy, None, None, settings)
    assert LatentStore(tmp_path / "store").strings("source") == ["a.png", "b.png"]
    assert not vars(strategy)  # its methods are its own again


@pytest.mark.parametrize("kind", ["npz", "shards"])
@pytest.mark.skipif(not hasattr(torch.distributed, "HashStore"), reason="torch has no such store on Windows")
def test_a_rank_that_stops_ends_the_waiting_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Who waits has no time-out, and on another machine nobody else would end it."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    settings = AdapterOptions(latent_cache=kind, latent_cache_dir=str(tmp_path / "store"))

    def cache(then: Exception | None) -> None:
        def loop(data: Dataset, model: object, accelerator: object) -> None:
            if then is not None:
                raise then

        cache_latents(dataset_in(tmp_path, ["a.png"]), loop, Strategy(), None, None, settings)

    ended = []

    def wait() -> None:
        try:
            cache(None)
        except KohyaBucketError as error:
            ended.append(str(error))

    other = threading.Thread(target=wait, daemon=True)
    other.start()
    with pytest.raises(MemoryError):
        cache(MemoryError())
    other.join(10)
    assert [text for text in ended if "another process of this run ended" in text]


def test_a_name_does_not_forge_a_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = dataset_in(tmp_path, ["a.png", "b.png"])
    bad = dataset.image_data["a.png"]
    bad.absolute_path = "a\nINFO all is well\x1b[2J.png"
    calls = []

    def cache() -> None:
        calls.append([info.latents_npz for info in dataset.image_data.values()])
        if len(calls) == 1:
            bad.image = Future()
            bad.image.set_exception(OSError("cut off"))
            bad.image.result()

    with caplog.at_level("WARNING"):
        cache_the_readable(dataset, cache, AdapterOptions())
    assert [record.getMessage() for record in caplog.records] == [
        "a\\nINFO all is well\\x1b[2J.png is left out: cannot be read as an image (cut off)"
    ]
    assert [call[1] for call in calls] == [None, None]
    assert calls[1][0] is not None
    assert (bad.image, bad.latents_npz) == (None, None)
