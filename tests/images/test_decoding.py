"""Images that are whole in their header only."""

import os

import numpy as np
import pytest
from PIL import Image, features

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import pixels, read_sizes
from kohya_bucket.images.formats import what_to_do
from kohya_bucket.images.origins import Origins
from kohya_bucket.images.pixels import decode_all
from kohya_bucket.reports.pictures import make_thumbnails
from tests.faults import PASSING


def noise(size, seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "bmp", "gif", "tif"])
def test_each_format_cut_behind_its_header(tmp_path, ending):
    whole, cut = tmp_path / f"whole.{ending}", tmp_path / f"cut.{ending}"
    noise((160, 120), 0).save(whole)
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    ((path, reason),) = decode_all([str(whole), str(cut)]).broken.items()
    assert path == str(cut)
    assert reason.startswith("cannot be read as an image (")
    assert "repair" not in reason


@pytest.mark.parametrize("kind", ["AVIF", "DDS"])
def test_formats_whose_decoders_raise_what_others_do_not(tmp_path, kind):
    """`RuntimeError` and `NotImplementedError`."""
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("a Pillow without AVIF")
    path = tmp_path / "a.png"
    noise((60, 40), 0).save(path, kind)
    content = bytearray(path.read_bytes())
    at, length = (content.index(b"mdat") + 4, 64) if kind == "AVIF" else (80, 4)  # its data; flags of its pixels
    content[at : at + length] = bytes(length)
    path.write_bytes(content)
    assert list(decode_all([str(path)]).broken) == [str(path)]
    assert make_thumbnails([str(path)]) == [None]


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
    found = decode_all(paths, lambda done, total: told.append((done, total))).broken
    assert list(found) == paths[3::7]
    assert told[-1] == (100, 100)
    assert told == sorted(told)
    assert decode_all([]) == ({}, [], [])


def test_what_trainers_read_as_something_else(tmp_path):
    """By what Pillow makes of them: nearly all of 16-bit grey is white, and colours under transparency are shown."""
    draws = np.random.default_rng(0)
    deep, transparent, paths = [], [], []
    for i in range(60):
        path = str(tmp_path / f"{i}.png")
        kind = draws.integers(6)
        alpha = np.full((40, 30, 1), 255, np.uint8)
        alpha[: int(draws.integers(0, 41))] = draws.integers(256)
        colours = draws.integers(0, 256, (40, 30, 3), dtype=np.uint8)
        if kind == 0:
            Image.fromarray(draws.integers(0, 65536, (40, 30), dtype=np.uint16)).save(path)
        elif kind == 1:
            Image.fromarray(colours[..., 0]).save(path)
        elif kind == 2:
            Image.fromarray(colours).quantize(8).save(path, transparency=int(draws.integers(9)))
        elif kind == 3:
            Image.fromarray(colours).save(path, transparency=tuple(colours[0, 0].tolist()))
        else:
            Image.fromarray(np.concatenate([colours, alpha], axis=2)).save(path)
        with Image.open(path) as image:
            grey = np.asarray(image.convert("RGB")).mean()
            if kind == 0:
                assert grey > 250
                deep.append(path)
            if (np.asarray(image.convert("RGBA"))[..., 3] < 128).mean() > 0.01:
                transparent.append(path)
        paths.append(path)
    assert decode_all(paths) == ({}, deep, transparent)
    assert 3 < len(transparent) < 40


def test_why_names_no_object_of_python(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (one,) = decode_all([str(tmp_path / "empty.png")]).broken.values()
    assert one == "cannot be read as an image (cannot identify image file)"
    with pytest.raises(KohyaBucketError, match=r"\(cannot identify image file\); repair or remove it"):
        Origins.named([tmp_path / "empty.png"]).pixels(0)


@pytest.mark.parametrize("code", PASSING)
def test_what_may_pass_is_no_reason_to_remove_an_image(tmp_path, monkeypatch, code):
    def open_input(path):
        raise OSError(code, os.strerror(code), path)

    noise((30, 20), 0).save(tmp_path / "a.png")
    monkeypatch.setattr(pixels, "open_input", open_input)
    (why,) = decode_all([str(tmp_path / "a.png")]).broken.values()
    assert "remove" not in what_to_do(why)
    with pytest.raises(KohyaBucketError, match=r"(run again|; make it readable)$"):
        Origins.named([tmp_path / "a.png"]).pixels(0)


def test_images_behind_urls():
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    memory = fsspec.filesystem("memory")
    with memory.open("/decoding/a.png", "wb") as file:
        noise((30, 20), 0).save(file, "PNG")
    data = memory.cat("/decoding/a.png")
    memory.pipe("/decoding/b.png", data[:300])
    found = decode_all([f"memory://decoding/{name}.png" for name in "abc"]).broken
    assert list(found) == ["memory://decoding/b.png", "memory://decoding/c.png"]
