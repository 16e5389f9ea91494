"""The image store: what passes, and what is named."""

import numpy as np
import pytest
from PIL import Image

from kohya_bucket import ExactBuckets
from kohya_bucket.originals.lopho import ImageStore, exact_batches


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for i, size in enumerate([(64, 96), (128, 64), (64, 96), (640, 480)]):
        pixels = rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    (tmp_path / "empty.png").write_bytes(b"")
    whole = (tmp_path / "3.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    return tmp_path


def test_headers_alone_and_pixels(folder) -> None:
    quick, thorough = ImageStore(folder), ImageStore(folder, validate=True)
    assert [p.rpartition("empty")[1] for p, _ in quick.failures] == ["empty"]
    assert len(quick) == 5
    assert len(thorough) == 4
    assert sorted(p[-9:] for p, _ in thorough.failures if not p.endswith("cut.png")) == ["empty.png"]
    assert any(p.endswith("cut.png") and reason for p, reason in thorough.failures)


def test_iteration_and_batches(folder) -> None:
    store = ImageStore(folder, validate=True)
    images = list(store)
    assert [i.position for i in images] == [0, 1, 2, 3]
    assert [[i.width, i.height] for i in images] == store.sizes.tolist()
    assert store[-1] == images[-1]
    placement = ExactBuckets(128, 32).place(store.sizes)
    batches = list(exact_batches(placement.bucket_index, 2))
    assert sorted(np.concatenate(batches).tolist()) == [0, 1, 2, 3]
    assert [len({placement.bucket(i) for i in b}) for b in batches] == [1] * len(batches)


def test_paths_may_be_given(folder) -> None:
    store = ImageStore([folder / "1.png", str(folder / "empty.png")])
    assert [(i.width, i.height) for i in store] == [(128, 64)]
    assert store.failures[0][0].endswith("empty.png")
