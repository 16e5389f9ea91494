"""imagesize, as sd-scripts pins it: where it is right the sizes are equal; where it is not, these are Pillow's."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kohya_bucket import KohyaBuckets, read_sizes

imagesize = pytest.importorskip("imagesize", reason="imagesize is not installed")
OLD = getattr(imagesize, "__version__", "1.4.1").startswith("1.")


def encoded(size: tuple[int, int], kind: str, mode: str = "RGB", **options: object) -> bytes:
    pixels = np.random.default_rng(size[0]).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP"])
def test_equal_where_imagesize_is_right(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "image"
    path.write_bytes(encoded((67, 45), kind))
    assert imagesize.get(str(path)) == tuple(read_sizes([path]).sizes[0]) == (67, 45)


@pytest.mark.skipif(not OLD, reason="imagesize 2 reads extended WebP right")
@pytest.mark.parametrize("size", [(1024, 1024), (640, 832)])
def test_extended_webp_is_not_one_pixel_short(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "alpha.webp"
    path.write_bytes(encoded(size, "WEBP", "RGBA"))
    true = tuple(read_sizes([path]).sizes[0].tolist())
    short = imagesize.get(str(path))
    assert true == size
    assert short == (size[0] - 1, size[1] - 1)
    rule = KohyaBuckets(1024, 256, 2048, 64, no_upscale=True)
    assert rule.assign(*true).as_tuple() == size
    assert rule.assign(*short).as_tuple() == (size[0] - 64, size[1] - 64)
