"""A caching call of sd-scripts, whole and ended half-way, with stand-ins for its objects."""

import contextlib
import errno
import itertools
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from kohya_bucket.errors import KohyaBucketError, LatentStoreError, StorageError, UnreadableError
from kohya_bucket.latents.encode.pipeline import Caching
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.vae.batches import BatchLimit
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.caching.encode import Condition, EncodingLoop
from kohya_bucket.trainers.sdscripts.caching.latents import cache_latents
from kohya_bucket.trainers.sdscripts.caching.session import temporary_folder
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.names import npz_path
from tests.full_disk import NoRoom

ARCH = ARCHITECTURES["sdxl"]


NAMES = [f"{n}.png" for n in range(7)]
ONE = SimpleNamespace(num_processes=1, process_index=0)


def load(infos: list[SimpleNamespace], alpha: bool, random_crop: bool) -> tuple[torch.Tensor, list, list, list]:
    """As the trainer's: pixels of images, and a list each of masks, sizes and crops."""
    pixels = []
    for info in infos:
        with Image.open(info.absolute_path) as image:
            pixels.append(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1)
    return torch.stack(pixels), [None] * len(infos), [info.image_size for info in infos], [(0, 0, 64, 64)] * len(infos)


class Strategy:
    """Its latents are means of pixels, and noise; `batches` are the names that it encoded at once."""

    cache_suffix = ARCH.suffix
    skip_disk_cache_validity_check = False

    def __init__(self, batch_size: int = 1, cache_to_disk: bool = True, room: int = 1000) -> None:
        self.batch_size, self.cache_to_disk, self.room, self.batches, self.ends = (
            batch_size,
            cache_to_disk,
            room,
            [],
            None,
        )

    def get_latents_npz_path(self, absolute_path: str, image_size: tuple[int, int]) -> str:
        return str(npz_path(absolute_path, image_size, ARCH))

    def load_latents_from_disk(self, npz_path: str, bucket_reso: tuple[int, int]) -> tuple[np.ndarray]:
        with np.load(npz_path) as file:
            return (file["latents"],)

    def cache_batch_latents(self, model, batch, flip_aug, alpha_mask, random_crop) -> None:
        ready = None if EncodingLoop.current is None else EncodingLoop.current.loaded(batch)
        pixels, _, sizes, crops = ready or load(batch, alpha_mask, random_crop)
        if len(batch) > self.room:
            raise RuntimeError("CUDA out of memory")
        if self.ends is not None and len(self.batches) == self.ends[0]:
            raise self.ends[1]
        self.batches.append([info.image_key for info in batch])
        mean = torch.nn.functional.avg_pool2d(pixels[:, :1].repeat(1, 4, 1, 1), 8)
        latents = mean + torch.randn_like(mean) + 10 * torch.randn(mean.shape)
        for info, latent, size, crop in zip(batch, latents, sizes, crops, strict=True):
            if self.cache_to_disk:
                self.save_latents_to_disk(info.latents_npz, latent, size, crop)
            else:
                info.latents = latent


class Dataset(SimpleNamespace):
    """As sd-scripts' own, it can be referred to weakly."""

    __hash__ = object.__hash__


def dataset_in(folder: Path, names: list[str]) -> Dataset:
    data = {}
    for name in names:
        Image.new("RGB", (64, 64), (len(data), 0, 0)).save(folder / name)
        data[name] = SimpleNamespace(
            image_key=name, absolute_path=str(folder / name), bucket_reso=(64, 64), image_size=(64, 64),
            resized_size=(64, 64), resize_interpolation=None, image=None, latents_npz=None,
        )  # fmt: skip
    subset = SimpleNamespace(flip_aug=False, alpha_mask=False, random_crop=False)
    return Dataset(image_data=data, image_to_subset=dict.fromkeys(names, subset), width=64, height=64)


def latents_of(folder: Path, batch_size: int, names: list[str], **more: object) -> dict[str, torch.Tensor]:
    """In memory."""
    dataset = dataset_in(folder, names)
    cache_latents(dataset, Strategy(batch_size, cache_to_disk=False, **more), None, ONE, load, AdapterOptions())
    return {name: info.latents for name, info in dataset.image_data.items()}


def test_a_latent_depends_on_its_image_and_the_seed_alone(tmp_path: Path) -> None:
    """And not on its batch, on what else is encoded, or on where memory runs out; training's generator stays."""
    names = [f"{n}.png" for n in range(7)]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    want = latents_of(tmp_path, 1, names)
    for size in (2, 3, 7):
        for got in (latents_of(tmp_path, size, names), latents_of(tmp_path, size, names, room=1)):
            assert all(torch.equal(got[name], want[name]) for name in names)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({latent.sum().item() for latent in want.values()}) == 7
    torch.manual_seed(4)
    assert not torch.equal(latents_of(tmp_path, 1, names)["0.png"], want["0.png"])


def test_batches_hold_neighbours_of_one_bucket(tmp_path: Path) -> None:
    names = [f"{n}.png" for n in range(23)]
    dataset, draws = dataset_in(tmp_path, names), random.Random(0)
    for info in dataset.image_data.values():
        info.bucket_reso = draws.choice([(64, 128), (128, 64), (64, 64)])
    for size in (1, 5):
        strategy = Strategy(size, cache_to_disk=False)
        cache_latents(dataset, strategy, None, ONE, load, AdapterOptions())
        buckets = [[dataset.image_data[name].bucket_reso for name in batch] for batch in strategy.batches]
        assert all(len(set(batch)) == 1 for batch in buckets)
        runs = [batch[0] for batch in buckets]
        assert len(set(runs)) == 1 + sum(a != b for a, b in itertools.pairwise(runs))
        assert sorted(name for batch in strategy.batches for name in batch) == sorted(names)
        if size > 1:  # as is asked for
            assert max(map(len, buckets)) == 5


def test_memory_that_runs_out_with_one_image_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        latents_of(tmp_path, 4, ["a.png", "b.png"], room=0)


def test_as_many_images_as_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With made-up numbers of a GPU."""
    draws = random.Random(0)
    for _ in range(200):
        free, per_pixel, peak = draws.randrange(1 << 28, 1 << 36), draws.randrange(500, 20_000), [0]
        for name, value in {"reset_peak_memory_stats": None, "memory_allocated": 0, "memory_reserved": 0}.items():
            monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _, peak=peak: peak[0])
        limit = BatchLimit("cuda:0")
        for k in range(4):
            size = draws.choice([256, 512, 1024]), draws.choice([256, 512, 1024])
            pixels = size[0] * size[1]
            most = limit.most(size)
            if k == 0:
                assert most == 1
            assert most == 1 or most * pixels <= min(8 << 20, 0.8 * free / per_pixel + 1)
            limit.begin()
            with monkeypatch.context() as meanwhile:  # what the next batch may take is asked while this one runs
                meanwhile.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
                assert limit.most(size) == most
            peak[0] = most * pixels * per_pixel
            limit.went_well(most, size)
    assert BatchLimit("cuda:0", 3).most((4096, 4096)) == 3


def test_a_run_that_ends_half_way_waits_for_no_image_that_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    strategy, dataset = Strategy(20, cache_to_disk=False), dataset_in(tmp_path, [f"{n}.png" for n in range(60)])
    loaded, is_next_begun = [], threading.Event()

    def slow(infos, *more):
        if len(loaded) >= 24:
            is_next_begun.set()
            time.sleep(0.1)
        loaded.extend(infos)
        return load(infos, *more)

    def interrupted(*arguments):
        assert is_next_begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(strategy, "cache_batch_latents", interrupted)
    with caplog.at_level("WARNING"), pytest.raises(KeyboardInterrupt):
        cache_latents(dataset, strategy, None, ONE, slow, AdapterOptions())
    assert len(loaded) < 40
    assert not caplog.records


def test_few_large_images_are_loaded_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of processors."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    dataset, strategy = dataset_in(tmp_path, [f"{n}.png" for n in range(30)]), Strategy(2, cache_to_disk=False)
    for info in dataset.image_data.values():
        info.image_size = 1 << 14, 1 << 14  # one fills a gigabyte
    begun = itertools.count(1)
    most = []

    def counting(infos, *more):
        most.append(next(begun) - sum(map(len, strategy.batches)))
        return load(infos, *more)

    cache_latents(dataset, strategy, None, ONE, counting, AdapterOptions())
    assert len(most) == 30
    assert max(most) <= 1 + 3 * 2  # with one batch that runs, one that is ready, and one that is put together


def test_what_cannot_be_copied_ahead_for_want_of_memory_is_copied_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a made-up GPU."""
    tried = []

    def pin(pixels: torch.Tensor) -> None:
        tried.append(len(pixels))
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    strategy, dataset = Strategy(2, cache_to_disk=False), dataset_in(tmp_path, ["a.png", "b.png", "c.png"])
    with Caching("latent", 3, keep=lambda _: None).running() as caching:
        loop = EncodingLoop(strategy, None, load, AdapterOptions(), caching, to_disk=False)
        loop._side_stream._stream = object()
        loop.run([(info, Condition((64, 64), False, False, False)) for info in dataset.image_data.values()], 1)
    assert tried == [2, 1]
    assert strategy.batches == [["a.png", "b.png"], ["c.png"]]


def test_whatever_a_strategy_that_is_not_known_draws_depends_on_its_image_and_the_seed(tmp_path: Path) -> None:
    """It gets as many images at once as sd-scripts would give it."""

    class Unknown(Strategy):
        cache_suffix = "_unknown.npz"

        def cache_batch_latents(self, model, batch, *more) -> None:
            self.batches.append([info.image_key for info in batch])
            for info in batch:
                info.latents = torch.normal(0.0, 1.0, (4, 8, 8)) + torch.rand(8) + torch.empty(8).normal_()

    torch.manual_seed(3)
    found = []
    for names in (["a.png", "b.png", "c.png"], ["b.png"]):
        dataset, strategy = dataset_in(tmp_path, names), Unknown(cache_to_disk=False)
        cache_latents(dataset, strategy, None, ONE, load, AdapterOptions())
        assert strategy.batches == [[name] for name in names]
        found.append(dataset.image_data["b.png"].latents)
    assert torch.equal(*found)
    assert torch.initial_seed() == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_encoded_before_an_interrupt_is_in_the_store(tmp_path: Path, error: type[BaseException]) -> None:
    strategy = Strategy()
    strategy.batch_size, strategy.ends = 1, (1, error)
    dataset = dataset_in(tmp_path, ["a.png", "b.png", "c.png"])
    dataset.image_data["a.png"].bucket_reso = (32, 32)  # a batch of its own
    settings = AdapterOptions(latent_cache="shards", latent_cache_dir=str(tmp_path / "store"))
    before = dict(vars(strategy))
    with pytest.raises(error):
        cache_latents(dataset, strategy, None, ONE, load_small, settings)
    assert LatentStore(tmp_path / "store").strings("source") == ["a.png"]
    assert vars(strategy) == before  # its methods are its own again


def load_small(infos: list[SimpleNamespace], alpha: bool, random_crop: bool) -> tuple[torch.Tensor, list, list, list]:
    pixels, *rest = load(infos, alpha, random_crop)
    width, height = infos[0].bucket_reso
    return (pixels[:, :, :height, :width], *rest)


TEMPORARY = [OSError(errno.EMFILE, "too many"), PermissionError(errno.EACCES, "held open"), StorageError("s3 is away")]


@pytest.mark.parametrize("error", TEMPORARY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("to_disk", [False, True])
def test_an_image_that_cannot_be_read_for_a_moment_is_encoded_after_the_others(
    tmp_path: Path, error: Exception, to_disk: bool
) -> None:
    """Left out here and found readable by the training, it would have no latents."""
    strategy, dataset = Strategy(2, to_disk), dataset_in(tmp_path, NAMES)
    cache_latents(dataset, strategy, None, ONE, refusing({"1.png": 1, "4.png": 1}, error), AdapterOptions())
    assert sorted(name for batch in strategy.batches for name in batch) == NAMES


@pytest.mark.parametrize("error", TEMPORARY, ids=lambda error: type(error).__name__)
def test_an_image_that_cannot_be_read_twice_ends_the_run_when_all_others_are_kept(
    tmp_path: Path, error: Exception
) -> None:
    strategy, dataset = Strategy(2), dataset_in(tmp_path, NAMES)
    with pytest.raises((UnreadableError, StorageError), match=r"1\.png: cannot be read now|s3 is away"):
        cache_latents(dataset, strategy, None, ONE, refusing({"1.png": 2}, error), AdapterOptions())
    missing = [name for name in NAMES if not Path(dataset.image_data[name].latents_npz).exists()]
    assert missing == ["1.png"]


@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_images_that_are_edited_while_others_are_encoded_are_encoded_again(tmp_path: Path, kind: str) -> None:
    """Some are loaded when they change: what their latents are made of is no longer there."""
    settings = AdapterOptions(latent_cache=kind, latent_cache_dir=str(tmp_path / "store"))
    dataset, whole = dataset_in(tmp_path, NAMES), threading.Lock()

    def load_whole(infos: list[SimpleNamespace], *more: object) -> object:
        with whole:
            return load(infos, *more)

    class Editing(Strategy):
        def cache_batch_latents(self, *arguments) -> None:
            if not self.batches:
                with whole:
                    for n, name in enumerate(NAMES):
                        Image.new("RGB", (64, 64), (255 - n, 255, 255)).save(tmp_path / name)
                        os.utime(tmp_path / name, ns=(n, n))
            super().cache_batch_latents(*arguments)

    for strategy, encoded in ((Editing(2), NAMES), (Strategy(2), NAMES), (Strategy(2), [])):
        for info in dataset.image_data.values():
            info.latents_npz = None
        cache_latents(dataset, strategy, None, ONE, load_whole, settings)
        assert sorted(name for batch in strategy.batches for name in batch) == encoded


@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_an_image_that_is_deleted_once_it_is_loaded_has_its_latents(tmp_path: Path, kind: str) -> None:
    """As one that is deleted a moment later."""
    settings = AdapterOptions(latent_cache=kind, latent_cache_dir=str(tmp_path / "store"))
    dataset = dataset_in(tmp_path, NAMES)

    def load_and_delete(infos: list[SimpleNamespace], *more: object) -> object:
        loaded = load(infos, *more)
        for info in infos:
            Path(info.absolute_path).unlink()
        return loaded

    strategy = Strategy(2)
    cache_latents(dataset, strategy, None, ONE, load_and_delete, settings)
    for info in dataset.image_data.values():
        assert np.isfinite(strategy.load_latents_from_disk(info.latents_npz, (64, 64))[0]).all()


@pytest.mark.parametrize("to_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_latents_that_are_not_finite_end_the_run_wherever_they_are_kept(
    tmp_path: Path, to_disk: bool, dtype: torch.dtype
) -> None:
    def load_bad(infos: list[SimpleNamespace], *more: object) -> object:
        pixels, *rest = load(infos, *more)
        pixels[[info.image_key == "3.png" for info in infos]] = float("nan")
        return (pixels, *rest)

    dataset, model = dataset_in(tmp_path, NAMES), SimpleNamespace(dtype=dtype)
    with pytest.raises(LatentStoreError, match=r"3\.png: its latent is not finite.*; it is not cached") as raised:
        cache_latents(dataset, Strategy(2, to_disk), model, ONE, load_bad, AdapterOptions())
    assert ("--no_half_vae" in str(raised.value)) == (dtype is torch.float16)
    assert not npz_path(str(tmp_path / "3.png"), (64, 64), ARCH).exists()


def test_a_full_temporary_folder_is_said_in_one_line(no_room: NoRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(no_room.folder))
    with no_room.full(), pytest.raises(LatentStoreError, match=f"{no_room.reason}.*, or set TMPDIR to another folder"):  # noqa: SIM117
        with temporary_folder() as folder:
            np.savez(folder / "made.npz", made=np.zeros(1 << 20))
    assert not [path for path in no_room.folder.iterdir() if path.is_dir()]


def refusing(times: dict[str, int], error: Exception) -> Callable[..., object]:
    """`load`, which raises an error that often, by image."""
    left = dict(times)

    def loading(infos: list[SimpleNamespace], *more: object) -> object:
        for info in infos:
            if left.get(info.image_key, 0):
                left[info.image_key] -= 1
                raise error
        return load(infos, *more)

    return loading


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

    def cache(then: Exception | None) -> None:
        folder = tmp_path / ("waits" if then is None else "ends")  # else one might find what the other has encoded
        folder.mkdir()
        strategy = Strategy()
        strategy.ends = None if then is None else (0, then)
        settings = AdapterOptions(latent_cache=kind, latent_cache_dir=str(folder / "store"))
        cache_latents(dataset_in(folder, ["a.png"]), strategy, None, ONE, load, settings)

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


@pytest.mark.parametrize("to_disk", [False, True])
def test_an_image_that_cannot_be_read_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, to_disk: bool
) -> None:
    """And its name does not forge a line of the log."""
    dataset = dataset_in(tmp_path, ["a.png", "b.png", "c.png"])
    bad = dataset.image_data["b.png"]
    (tmp_path / "b.png").unlink()
    bad.absolute_path = str(tmp_path / "a\nINFO all is well\x1b[2J.png")
    Path(bad.absolute_path).write_bytes(b"no image")
    strategy = Strategy(2, to_disk)
    with caplog.at_level("WARNING"):
        cache_latents(dataset, strategy, None, ONE, load, AdapterOptions())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{tmp_path}/a\\nINFO all is well\\x1b[2J.png is left out: cannot be read as an image")
    assert sorted(name for batch in strategy.batches for name in batch) == ["a.png", "c.png"]
    assert bad.latents_npz is None
    with pytest.raises(KohyaBucketError, match=r"repair or remove it, or leave on_bad_image out"):
        cache_latents(dataset, strategy, None, ONE, load, AdapterOptions(on_bad_image="stop"))
