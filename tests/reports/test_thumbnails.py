"""Contact sheets are bounded, cover the buckets, and survive what does not decode."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from kohya_bucket import KohyaBuckets
from kohya_bucket.reports.analysis import analyze
from kohya_bucket.reports.pictures import caption_beside, choose_examples, illustrate, make_thumbnails
from kohya_bucket.trainers.door.subject import ImageTable, Subject


@pytest.mark.parametrize("total", [0, 1, 7, 60, 1000])
def test_examples_are_bounded_distinct_and_start_with_the_worst(total) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(300, 3000, (2000, 2)).astype(np.int32)
    a = analyze(Subject("set", ImageTable.sized([str(i) for i in range(2000)], sizes), KohyaBuckets(1024, 256, 2048)))
    examples = choose_examples(a, total)
    chosen = [i for _, some in examples for i in some]
    assert len(chosen) <= total
    assert len(set(chosen)) == len(chosen)
    for k, some in examples:
        assert (a.placement.bucket_index[some] == k).all()
        losses = a.placement.crop_loss[some]
        assert losses[0] == a.buckets[k].worst_crop
        assert (np.diff(losses) <= 0).all()
        if len(some) > 2:
            assert a.scale[some].max() == np.nanmax(a.scale[a.placement.bucket_index == k])


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "I", "F"])
def test_every_mode_becomes_a_small_picture_of_the_same_aspect(tmp_path, mode) -> None:
    image = Image.fromarray(np.arange(600 * 900, dtype=np.float32).reshape(600, 900) % 255)
    image = (
        image
        if mode == "F"
        else Image.fromarray(np.asarray(image).astype(np.uint8)).convert("I" if mode == "I;16" else mode)
    )
    if mode == "I;16":
        image = Image.fromarray(np.arange(600 * 900, dtype=np.uint16).reshape(600, 900))
    path = tmp_path / f"x.{'tif' if mode in ('F', 'I', 'CMYK') else 'png'}"
    image.save(path)
    ((uri, width, height),) = make_thumbnails([str(path)])
    content = base64.b64decode(uri.split(",", 1)[1])
    with Image.open(io.BytesIO(content)) as small:
        assert small.size == (width, height)
    assert abs(width / height - 1.5) < 0.05
    assert width * height <= 120 * 121
    assert len(content) < 12_000


def test_what_does_not_decode_is_left_out(tmp_path) -> None:
    good, cut = tmp_path / "good.png", tmp_path / "cut.png"
    Image.effect_noise((400, 300), 50).save(good)
    cut.write_bytes(good.read_bytes()[:2000])
    (tmp_path / "none.jpg").write_bytes(b"")
    paths = [str(cut), str(tmp_path / "none.jpg"), str(tmp_path / "absent.png"), str(good)]
    assert [p is None for p in make_thumbnails(paths)] == [True, True, True, False]


def test_one_is_turned_where_training_turns_the_image(tmp_path) -> None:
    path, exif = str(tmp_path / "x.jpg"), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (600, 400)).save(path, exif=exif)
    for turned, landscape in (([], True), ([path], False)):
        ((_, width, height),) = make_thumbnails([path], turned=turned)
        assert (width > height) == landscape


def test_captions_are_cut_and_optional(tmp_path) -> None:
    image = tmp_path / "a.b.png"
    assert caption_beside(str(image), (".txt", ".caption")) is None
    (tmp_path / "a.b.caption").write_text("x" * 1000, encoding="utf-8")
    assert caption_beside(str(image), (".txt", ".caption")) == "x" * 300 + "…"
    (tmp_path / "a.b.txt").write_bytes(b"caf\xe9\n")
    assert caption_beside(str(image), (".txt", ".caption")) == "caf\ufffd"


def test_what_does_not_decode_for_its_picture_is_broken(tmp_path) -> None:
    paths = [tmp_path / f"{name}.png" for name in "abc"]
    for path in paths:
        Image.effect_noise((90, 60), 50).save(path)
    paths[1].write_bytes(paths[1].read_bytes()[:1000])
    names = [*map(str, paths), "tar that is no file.tar/a.png"]
    before = analyze(
        Subject("set", ImageTable.sized(names, np.full((4, 2), (90, 60), dtype=np.int32)), KohyaBuckets(512))
    )
    (after,), pictures = illustrate([before], 8)
    assert (before.summary.placed, after.summary.placed, sorted(after.images.failures)) == (4, 3, [1])
    assert [bool(pictures[name]) for name in names] == [True, False, True, False]
