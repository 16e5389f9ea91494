"""A loader in one call."""

import numpy as np
import pytest
from torch import zeros
from torch.utils.data import ConcatDataset, DataLoader, SequentialSampler, Subset, TensorDataset, random_split

from kohya_bucket import BucketBatchSampler, BucketedDataset, KohyaBuckets, bucketed_loader, plan_epoch
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
    import accelerate

    loader = bucketed_loader(folder, RULE, 2, accelerator=accelerate.Accelerator(cpu=True))
    assert len(seen(loader)) == len(SIZES)


class Untouchable(BucketedDataset):
    def __getitem__(self, index):
        raise AssertionError("an item is read")

    __getitems__ = __getitem__


def test_datasets_that_do_not_know_their_buckets_are_refused_before_they_are_read(folder) -> None:
    dataset = Untouchable.from_folder(folder, RULE)
    parts = random_split(dataset, [3, 4])
    for wrapped in (Subset(dataset, [0]), *parts, Subset(parts[0], [0]), ConcatDataset(parts), TensorDataset(zeros(3))):
        for make in (lambda w=wrapped: BucketBatchSampler(w, 2), lambda w=wrapped: bucketed_loader(w, RULE, 2)):
            with pytest.raises(
                KohyaBucketError, match=rf"^{type(wrapped).__name__} has no bucket_indices, .*repeats=, 0"
            ):
                make()
    for joined in ([dataset, dataset], (dataset, 1), [[dataset]]):
        with pytest.raises(KohyaBucketError, match=r"^a (list|tuple) of Untouchable has .*to join several"):
            BucketBatchSampler(joined, 2)
        with pytest.raises(KohyaBucketError, match="Untouchable"):
            plan_epoch(joined, 2)
    with pytest.raises(KohyaBucketError, match="use_distributed_sampler=False"):  # as Lightning makes it anew
        BucketBatchSampler(SequentialSampler(dataset), batch_size=2, drop_last=False)


@pytest.mark.parametrize("remainder", ["keep", "catch_all"])
def test_a_split_is_a_dataset_with_repeats(folder, remainder) -> None:
    dataset = BucketedDataset.from_folder(folder, RULE)
    trained = np.arange(len(dataset)) % 3 > 0
    parts = [bucketed_loader(dataset, batch_size=2, repeats=part, remainder=remainder) for part in (trained, ~trained)]
    for loader, part in zip(parts, (trained, ~trained), strict=True):
        assert seen(loader) == sorted(dataset.source.name(int(i)) for i in np.flatnonzero(part))
        assert (loader.bucket_sampler.ledger().missed, loader.bucket_sampler.ledger().asked) == (0, part.sum())


def test_the_ledger_counts_files_that_could_not_be_read(tmp_path) -> None:
    make_pictures(tmp_path, [(100, 100)] * 7, caption="a caption")
    (tmp_path / "broken.png").write_bytes(b"no image")
    dataset = BucketedDataset.from_folder(tmp_path, RULE)
    for name in ("0.png", "1.png"):  # their headers are sound
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:60])
    sampler = BucketBatchSampler(dataset, 3)
    assert str(sampler.ledger()) == "8 images, 1 missed (1 without a bucket), 0 repeated"
    for _ in range(2):
        for _ in DataLoader(dataset, batch_sampler=sampler):
            pass
        ledger = sampler.ledger()
        assert str(ledger) == (
            "8 images, 3 missed (2 unreadable, 1 without a bucket), 2 repeated (2 instead of unreadable ones)"
        )
        assert (ledger.missed, ledger.repeated, ledger.trained) == (3, 2, 7)


def test_what_is_missing_or_misspelled(folder) -> None:
    with pytest.raises(KohyaBucketError, match="no rule says where images go"):
        bucketed_loader(folder, batch_size=2)
    with pytest.raises(TypeError, match="'remainder'"):
        bucketed_loader(folder, RULE, 2, remaindre="pad")
    for source, rule in ((folder, RULE), (BucketedDataset.from_folder(folder, RULE), None)):
        with pytest.raises(KohyaBucketError, match="caption_column is 'text'"):
            bucketed_loader(source, rule, 2, caption_column="text")
