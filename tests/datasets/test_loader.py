"""A loader in one call."""

import pytest

pytest.importorskip("torch", reason="loaders are torch's")

from kohya_bucket import BucketedDataset, KohyaBuckets, bucketed_loader
from kohya_bucket.errors import KohyaBucketError
from tests.pictures import make_pictures

RULE = KohyaBuckets(128, 64, 256, 32)
SIZES = [(100, 100), (90, 120), (200, 100), (64, 64), (128, 130), (300, 180), (100, 101)]


@pytest.fixture
def folder(tmp_path):
    make_pictures(tmp_path / "images", SIZES, caption="a caption")
    return tmp_path / "images"


def seen(loader):
    return sorted(path for batch in loader for path in batch["path"])


def test_every_image_once_in_batches_of_one_size(folder) -> None:
    loader = bucketed_loader(folder, RULE, 2, seed=1)
    for _ in range(2):
        assert seen(loader) == sorted(str(path) for path in folder.glob("*.png"))
    assert {caption for batch in loader for caption in batch["caption"]} == {"a caption"}
    assert loader.bucket_sampler.ledger().repeated == 0


def test_a_data_set_that_has_its_buckets(folder) -> None:
    dataset = BucketedDataset.from_folder(folder, RULE)
    assert len(seen(bucketed_loader(dataset, batch_size=3))) == len(SIZES)
    with pytest.raises(KohyaBucketError, match="has its buckets: leave the rule out"):
        bucketed_loader(dataset, RULE, 3)


def test_with_accelerate(folder) -> None:
    accelerate = pytest.importorskip("accelerate", reason="prepares the loader")
    loader = bucketed_loader(folder, RULE, 2, accelerator=accelerate.Accelerator(cpu=True))
    assert len(seen(loader)) == len(SIZES)


def test_what_is_missing_or_misspelled(folder) -> None:
    with pytest.raises(KohyaBucketError, match="no rule says where images go"):
        bucketed_loader(folder, batch_size=2)
    with pytest.raises(TypeError, match="'remainder'"):
        bucketed_loader(folder, RULE, 2, remaindre="pad")
