"""Which file ai-toolkit's latents of an image are taken from."""

from __future__ import annotations

import os

import numpy as np
from safetensors.numpy import save_file

from kohya_bucket.trainers.ai_toolkit.latents import current_name


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
