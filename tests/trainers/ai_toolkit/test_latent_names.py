"""Which file ai-toolkit's latents of an image are taken from."""

import errno
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kohya_bucket.errors import UnreadableError
from kohya_bucket.trainers.ai_toolkit.latents import current_name, note_digest
from tests.faults import PASSING, Faults


def test_an_image_dated_in_the_future_is_encoded_once(tmp_path):
    image, cache = tmp_path / "a.png", str(tmp_path / "a.safetensors")
    image.touch()
    os.utime(image, (4e9, 4e9))
    for _ in range(3):
        name = current_name(cache, str(image))
        save_file({"latent": np.zeros(4, np.float32)}, name)
    assert name == current_name(cache, str(image)) == cache
    os.utime(image, (2000, 2000))
    os.utime(cache, (1000, 1000))  # of before the image was edited
    assert current_name(cache, str(image)) != cache


def test_latents_of_which_a_byte_changed_are_not_used(tmp_path):
    rng = np.random.default_rng(0)
    image, cache = tmp_path / "a.png", tmp_path / "a.safetensors"
    image.touch()
    tensors = {"latent": rng.random((4, 8, 8), np.float32), "num_frames": np.array(3, np.int32)}
    save_file(tensors, cache, {"latent_version": "1"})
    assert current_name(str(cache), str(image)) == str(cache)  # of ai-toolkit alone: nothing is known of its content
    note_digest(str(cache))
    whole = cache.read_bytes()
    assert b"latent_version" in whole
    missed = 0
    for at in (*rng.integers(0, len(whole), 100), *range(len(whole) - 1028, len(whole), 50)):
        changed = bytearray(whole)
        changed[at] ^= 1 << int(rng.integers(8))
        cache.write_bytes(changed)
        if current_name(str(cache), str(image)) == str(cache):  # a letter of what the metadata say besides
            missed += 1
            read = load_file(cache)
            assert all(np.array_equal(read[name], tensor) for name, tensor in tensors.items())
    assert missed < 30
    cache.write_bytes(whole)
    assert current_name(str(cache), str(image)) == str(cache)


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_latents_that_cannot_be_read_now_end_the_run_with_one_line(tmp_path, monkeypatch, code):
    cache = tmp_path / "a.safetensors"
    save_file({"latent": np.zeros(4, np.float32)}, cache)
    before, faults = cache.read_bytes(), Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(1, 100), code), pytest.raises(UnreadableError, match="cannot be read now"):
        note_digest(str(cache))
    assert cache.read_bytes() == before
