"""Caches that are damaged, in the way, or not made: found before the training, and named."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.latents import LatentStore, precompute_latents
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
from kohya_bucket.trainers.sdscripts.npz.names import npz_path
from kohya_bucket.trainers.sdscripts.npz.read_write import text_stale_reasons, write_arrays
from tests.command_line import Command
from tests.latents.stub_encoders import MeanEncoder, PosteriorStub, dataset_of, make_images
from tests.reported.case import reported

SIZES = [(64, 64), (100, 60)]


def with_a_changed_byte(path: Path, array: str) -> None:
    """One byte of an array changed; length and time as before."""
    when = path.stat()
    data = bytearray(path.read_bytes())
    with np.load(path) as file:
        name = next(name for name in file if name.startswith(array))
        data[data.index(file[name].tobytes()) + 5] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(when.st_atime_ns, when.st_mtime_ns))


@reported(
    "zipfile.BadZipFile: Bad CRC-32 for file 'latents.npy' or 't5_out.npy' in the middle of a training",
    "bmaltais/kohya_ss#3155", "kohya-ss/sd-scripts#1278",
    trainer="sd-scripts looks at names and shapes when it checks a cache, and stops when it reads the bytes",
    here="every byte is read and compared with its checksum before a cache counts: latents, masks and text outputs; "
    "what is damaged is encoded again",
    command="kohya-bucket precompute … --format npz, kohya-bucket doctor, or the training itself",
    origin="the checksums that a zip has",
)  # fmt: skip
def test_a_byte_that_changed_is_found(tmp_path: Path) -> None:
    images = make_images(tmp_path / "images", SIZES, alpha=True)

    def run():
        return precompute_latents(dataset_of(images), PosteriorStub(), NpzFiles("sd"), mask=True)

    run()
    path = npz_path(images[0], SIZES[0], ARCHITECTURES["sd"])
    good = path.read_bytes()
    for array in ("latents", "alpha_mask"):
        with_a_changed_byte(path, array)
        assert (run().encoded, run().current) == (1, 2)
        assert path.read_bytes() == good
    text = tmp_path / "a_flux_te.npz"
    write_arrays(text, {"t5_out": np.arange(64, dtype=np.float32)})
    assert text_stale_reasons(text) == []
    with_a_changed_byte(text, "t5_out")
    assert list(map(str, text_stale_reasons(text))) == ["the checksum of t5_out is wrong"]


@reported(
    "an edited image of the same size: the latents of the old one are trained",
    "bmaltais/kohya_ss#1629",
    trainer="sd-scripts keeps the npz as long as its size fits",
    here="each cache has a fingerprint of the image's content, and one that does not fit is encoded again",
    command="kohya-bucket precompute … --format npz, kohya-bucket doctor, or the training itself",
    origin="another picture of the same size",
)  # fmt: skip
def test_an_edited_image_is_encoded_again(tmp_path: Path) -> None:
    images = make_images(tmp_path / "images", SIZES)

    def run():
        return precompute_latents(dataset_of(images), PosteriorStub(), NpzFiles("sd"))

    run()
    Image.new("RGB", SIZES[0], "red").save(images[0])
    assert (run().encoded, run().current) == (1, 2)


@reported(
    "CUDA out of memory while caching latents, and no word which image it was",
    "bmaltais/kohya_ss#1441",
    trainer="sd-scripts ends with torch's error",
    here="batches are halved down to one image; one that does not fit alone is named with its size, and what was "
    "encoded before is stored",
    command="kohya-bucket precompute data/ --vae … --arch sdxl",
    origin="the name of the image that was given",
)  # fmt: skip
def test_an_image_that_does_not_fit_is_named(tmp_path: Path) -> None:
    class Small(MeanEncoder):
        def encode(self, pixels):
            if pixels.shape[-2:] != (64, 64):
                raise RuntimeError("CUDA out of memory. Tried to allocate 512.00 MiB")
            return super().encode(pixels)

    images = make_images(tmp_path / "images", SIZES)
    with pytest.raises(KohyaBucketError, match=r"img_001\.png: .* 80x48 pixels") as error:
        precompute_latents(dataset_of(images), Small(), tmp_path / "out")
    assert str(error.value).count("\n") == 0
    assert LatentStore(tmp_path / "out").strings("source") == ["img_000.png"]


@reported(
    "cache_latents_to_disk with images in a folder that cannot be written",
    trainer="sd-scripts ends with a PermissionError for the npz",
    here="the line says that npz lie beside their images, and that shards can lie anywhere",
    command='latent_cache = "shards" with latent_cache_dir, or kohya-bucket precompute … --format shards --output DIR',
    origin="a few lines of the rule",
)  # fmt: skip
def test_a_folder_that_cannot_be_written_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    images = make_images(tmp_path / "images", SIZES)
    monkeypatch.setattr("kohya_bucket.files._rename_over", refuse)
    with pytest.raises(LatentStoreError, match="read-only; keep latents elsewhere, since npz lie beside their images"):
        precompute_latents(dataset_of(images), PosteriorStub(), NpzFiles("sd"))


@reported(
    "a folder or a store on a network drive that is away for a moment, and caches that are gone afterwards",
    trainer="sd-scripts encodes again what it cannot read, over what was there",
    here="only bytes that were read and are wrong are damage; whatever cannot be read ends the command, and stays",
    command="kohya-bucket cache prune latents/ --damaged",
    origin="the files before and after",
)  # fmt: skip
def test_a_store_that_cannot_be_read_now_is_left_as_it_is(
    tmp_path: Path, command_line: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.faults import PASSING, Faults

    root = tmp_path / "store"
    precompute_latents(dataset_of(make_images(tmp_path / "images", SIZES)), MeanEncoder(), root)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    faults = Faults(root / "shards")
    faults.install(monkeypatch)
    for code in PASSING:
        with faults.at(range(3, 10**9), code):
            ended, _, errors = command_line("cache", "prune", root, "--damaged")
        assert (ended, os.strerror(code) in errors) == (1, True)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
