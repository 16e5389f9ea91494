"""Images of many shapes for the examples, so that each of them runs without any data of your own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIZES = [(192, 128), (128, 192), (160, 160), (240, 120), (110, 200), (150, 140)]


def make_images(folder: Path, count: int = 36) -> list[Path]:
    """Write `count` pictures with captions beside them; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    paths = []
    for i in range(count):
        width, height = SIZES[int(rng.integers(len(SIZES)))]
        colour = rng.integers(0, 256, 3)
        fade = np.linspace(0, 1, width)[None, :, None] * np.ones((height, 1, 1))
        path = folder / f"{i:03d}.png"
        Image.fromarray((colour * fade).astype(np.uint8)).save(path)
        path.with_suffix(".txt").write_text(f"a fade to {colour.tolist()}", encoding="utf-8")
        paths.append(path)
    return paths
