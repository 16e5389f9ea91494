"""While an encoder has one batch, the next one is begun and the one before is fetched: nothing else is stored."""

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kohya_bucket.latents import LatentStore, precompute_latents
from kohya_bucket.latents.encode.pipeline import Background
from kohya_bucket.latents.vae.device import SideStream, Span, await_copy
from kohya_bucket.latents.vae.encoder import BatchEncoder
from tests.latents.stub_encoders import MeanEncoder, PosteriorStub, dataset_of, make_images


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """Batches that are waited for longer or shorter, as on a GPU; what was begun and finished, in order."""
    happened: list[tuple[str, tuple[str, ...]]] = []
    draws = random.Random(0)

    class Waiting(BatchEncoder):
        def begin(self, pixels, seeds, names):
            running = super().begin(pixels, seeds, names)
            happened.append(("begun", tuple(names)))
            return running

        def finish(self, running):
            time.sleep(draws.random() / 100)
            happened.append(("finished", tuple(running.names)))
            return super().finish(running)

    monkeypatch.setattr("kohya_bucket.latents.encode.precompute.BatchEncoder", Waiting)
    return happened


def latents_in(folder: Path) -> dict[str, np.ndarray]:
    store = LatentStore(folder)
    return {store.entry(i).source: store.read(i, flipped=False) for i in range(len(store))}


def test_batches_in_flight_store_what_one_after_another_would(tmp_path: Path, images, in_flight) -> None:
    draws = random.Random(0)
    for n in range(3):
        options = {"batch_size": draws.randrange(1, 5), "seed": draws.randrange(100), "flip": n % 2 == 0}
        folder = tmp_path / str(n)
        in_flight.clear()
        precompute_latents(dataset_of(images), PosteriorStub(), folder / "several", **options)
        begun = [names for what, names in in_flight if what == "begun"]
        assert [names for what, names in in_flight if what == "finished"] == begun
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kohya_bucket.latents.encode.precompute.BatchEncoder", BatchEncoder)
            patch.setattr("kohya_bucket.latents.encode.worker._MOST_IN_ENCODER", 1)
            precompute_latents(dataset_of(images), PosteriorStub(), folder / "one", **options)
        several, one = latents_in(folder / "several"), latents_in(folder / "one")
        assert several.keys() == one.keys()
        assert all(np.array_equal(several[name], one[name]) for name in one)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_batch_in_the_encoder_is_stored_when_the_next_one_ends_the_run(
    tmp_path: Path, images, in_flight, error: type[BaseException]
) -> None:
    class Ending(MeanEncoder):
        def encode(self, pixels):
            if len(self.batches) == 2:
                raise error
            return super().encode(pixels)

    with pytest.raises(error):
        precompute_latents(dataset_of(images), Ending(), tmp_path / "out", batch_size=2)
    before = {name for what, names in in_flight if what == "begun" for name in names}
    assert latents_in(tmp_path / "out").keys() == before


class OnProcessor(MeanEncoder):
    device = torch.device("cpu")


@pytest.mark.parametrize(
    ("encoder", "batch_size", "most"), [(OnProcessor, None, 4), (OnProcessor, 7, 7), (MeanEncoder, None, 8)]
)
def test_as_many_images_at_once_as_asked_for_or_as_memory_has_room_for(
    tmp_path: Path, encoder: type[MeanEncoder], batch_size: int | None, most: int
) -> None:
    """On a processor no more pixels than one image of 1024x1024 has; 8 where it is not known what encodes."""
    images = make_images(tmp_path / "images", [(512, 512)] * 9)
    one = encoder()
    dataset = dataset_of(images, area=(512, 512), max_size=512)
    precompute_latents(dataset, one, tmp_path / "out", batch_size=batch_size)
    assert max(one.batches) == most
    assert sum(one.batches) == 9


def test_nothing_overlaps_on_a_processor() -> None:
    sent, tensor = SideStream(torch.device("cpu")), torch.zeros(3)
    span = Span(torch.device("cpu"))
    copy, event = sent.send(tensor)
    await_copy(copy, event)
    span.end()
    assert copy is tensor
    assert event is None
    assert 0 <= span.seconds() < 60


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_and_times_on_a_gpu(tmp_path: Path, images) -> None:
    class OnGpu(PosteriorStub):
        device = torch.device("cuda", 0)

    reports = [
        precompute_latents(dataset_of(images), encoder, tmp_path / encoder.__class__.__name__, batch_size=2)
        for encoder in (OnGpu(), PosteriorStub())
    ]
    on_gpu, here = (latents_in(tmp_path / name) for name in ("OnGpu", "PosteriorStub"))
    assert all(np.allclose(on_gpu[name], here[name], atol=1e-5) for name in here)
    assert 0 <= reports[0].device_idle <= reports[0].seconds


def test_after_an_error_nobody_waits_for_what_was_taken_back():
    begin, begun = threading.Event(), []

    def work(number):
        begun.append(number)
        begin.wait(20)
        raise OSError("no space")

    writer = Background(work)
    for number in range(3):
        writer.put(number)
    begin.set()
    with pytest.raises(OSError, match="no space"):
        writer.close()
    writer.close()
    assert begun == [0]
