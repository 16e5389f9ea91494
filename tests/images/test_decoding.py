"""Images that are whole in their header only."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import read_sizes
from kohya_bucket.images.pixels import load_pixels, undecodable


def noise(size, seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "bmp", "gif", "tif"])
def test_each_format_cut_behind_its_header(tmp_path, ending):
    whole, cut = tmp_path / f"whole.{ending}", tmp_path / f"cut.{ending}"
    noise((160, 120), 0).save(whole)
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    ((path, reason),) = undecodable([str(whole), str(cut)])
    assert path == str(cut)
    assert reason.startswith("cannot be read as an image (")
    assert "repair" not in reason


def test_all_are_counted_in_their_order(tmp_path):
    paths = []
    for i in range(100):
        path = tmp_path / f"{i:03}.png"
        noise((20, 20), i).save(path)
        if i % 7 == 3:
            path.write_bytes(path.read_bytes()[:200])
        paths.append(str(path))
    assert (read_sizes(paths).sizes == 20).all()
    told = []
    found = undecodable(paths, lambda done, total: told.append((done, total)))
    assert [path for path, _ in found] == paths[3::7]
    assert told[-1] == (100, 100)
    assert told == sorted(told)
    assert undecodable([]) == []


def test_why_names_no_object_of_python(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (one,) = undecodable([str(tmp_path / "empty.png")])
    assert one[1] == "cannot be read as an image (cannot identify image file)"
    with pytest.raises(KohyaBucketError, match=r"\(cannot identify image file\); repair or remove it"):
        load_pixels(tmp_path / "empty.png", fetch=lambda: b"")


def test_images_behind_urls():
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    memory = fsspec.filesystem("memory")
    with memory.open("/decoding/a.png", "wb") as file:
        noise((30, 20), 0).save(file, "PNG")
    data = memory.cat("/decoding/a.png")
    memory.pipe("/decoding/b.png", data[:300])
    found = undecodable([f"memory://decoding/{name}.png" for name in "abc"])
    assert [path for path, _ in found] == ["memory://decoding/b.png", "memory://decoding/c.png"]
