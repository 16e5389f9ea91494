"""`decode="fast"`: the same items except for small differences of their pixels, wherever the images come from."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from kohya_bucket import BucketedDataset, KohyaBuckets
from kohya_bucket.datasets.sources import cell_picture
from kohya_bucket.datasets.streaming import StreamingBuckets
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import pixels as pixels_module

pytestmark = pytest.mark.further

RULE = KohyaBuckets(64, 32, 128, 16)
SIZES = [(301, 199), (199, 301), (130, 130), (70, 66), (500, 300), (90, 64), (40, 30)]
SAME = ("bucket", "path", "caption", "original_size", "crop_ltrb")


def encoded(size: tuple[int, int], format: str = "JPEG", orientation: int = 1) -> bytes:
    noise = np.random.default_rng(sum(size)).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(file, format, exif=exif, quality=92)
    return file.getvalue()


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for i, size in enumerate(SIZES):
        (tmp_path / f"{i}.jpg").write_bytes(encoded(size))
        (tmp_path / f"{i}-turned.jpg").write_bytes(encoded(size, orientation=5 + i % 4))
        (tmp_path / f"{i}.png").write_bytes(encoded(size, "PNG"))
    return sorted(tmp_path.iterdir())


@pytest.fixture
def scales(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The fractions that were decoded at."""
    found: list[int] = []
    monkeypatch.setattr(
        pixels_module, "draft", lambda *a, real=pixels_module.draft, **k: found.append(real(*a, **k)) or found[-1]
    )
    return found


def assert_alike(fast: dict, exact: dict) -> None:
    for name in SAME:
        assert np.array_equal(fast[name], exact[name]) if name in SAME[3:] else fast[name] == exact[name]
    assert fast["image"].shape == exact["image"].shape
    assert (fast["image"] - exact["image"]).abs().mean() < 1 / 127.5


@pytest.mark.long
@pytest.mark.parametrize("obey_exif", [False, True])
@pytest.mark.parametrize("rule", [RULE, KohyaBuckets(64, reso_steps=16, no_upscale=True)])
def test_items_are_those_of_exact(paths: list[Path], scales: list[int], obey_exif: bool, rule: object) -> None:
    exact = BucketedDataset(paths, rule, obey_exif=obey_exif)
    fast = BucketedDataset(paths, rule, obey_exif=obey_exif, decode="fast")
    same = 0
    for i, path in enumerate(paths):
        assert_alike(fast[i], exact[i])
        resized, size = exact.resized_sizes[i], exact.sizes[i]
        if (path.suffix == ".png" or scales[-1] == 1) and ((resized > size).any() or (resized == size).all()):
            assert torch.equal(fast[i]["image"], exact[i]["image"])  # nothing is shrunk
            same += 1
    assert same
    assert set(scales) == {1, 2, 4}


def test_tables_and_streams_too(scales: list[int]) -> None:
    hf = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    cells = [{"bytes": encoded(size, orientation=6), "path": None} for size in SIZES]
    table = hf.Dataset.from_dict({"image": cells}).cast_column("image", hf.Image())
    exact, fast = (BucketedDataset.from_hf(table, RULE, decode=decode) for decode in ("exact", "fast"))
    for i in range(len(SIZES)):
        assert_alike(fast[i], exact[i])
    assert set(scales) == {1, 2, 4}


def test_streams(scales: list[int]) -> None:
    samples = [{"image": encoded(size, orientation=8), "name": str(i)} for i, size in enumerate(SIZES)]
    batches = []
    for decode in ("exact", "fast"):
        stream = StreamingBuckets(samples, RULE, 1, name_column="name", shuffle=False, decode=decode)
        batches.append(list(DataLoader(stream, batch_size=None)))
    for exact, fast in zip(*batches, strict=True):
        assert_alike(fast, exact)
    assert set(scales) == {1, 2, 4}


def test_exact_never_decodes_at_a_fraction(paths: list[Path], scales: list[int]) -> None:
    for i in range(len(paths)):
        BucketedDataset(paths, RULE)[i]
    assert scales == []


class WithoutFractions:
    """A source as it was before there were fractions."""

    def __len__(self) -> int:
        return 1

    def read_sizes(self) -> tuple[np.ndarray, list]:
        return np.array([(80, 80)], dtype=np.int32), []

    def pixels(self, index: int) -> np.ndarray:
        return cell_picture(encoded((80, 80)), False).pixels

    def caption(self, index: int) -> str:
        return ""

    def name(self, index: int) -> str:
        return "one"


def test_what_cannot_be_fast_is_said(paths: list[Path]) -> None:
    source = WithoutFractions()
    assert BucketedDataset.from_source(source, RULE)[0]["image"].shape == (3, 64, 64)
    with pytest.raises(KohyaBucketError, match="source is a WithoutFractions without picture"):
        BucketedDataset.from_source(source, RULE, decode="fast")
    with pytest.raises(KohyaBucketError, match="decode is 'quick'"):
        BucketedDataset(paths, RULE, decode="quick")
    with pytest.raises(KohyaBucketError, match="fast' chooses the filter itself, but interpolation is 'lanczos'"):
        StreamingBuckets([], RULE, 1, decode="fast", interpolation="lanczos")
