"""A loader in one call."""

import numpy as np
import pytest
from torch import zeros
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)
from torchdata.stateful_dataloader import StatefulDataLoader

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


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_wrappers_that_drop_the_bucket_of_an_index_are_refused_before_an_image_is_read(folder, loader) -> None:
    dataset = Untouchable.from_folder(folder, RULE)
    options = {"remainder": "catch_all", "bucket_sizes": dataset.bucket_set.sizes}
    parts = random_split(dataset, [3, 4])
    rest = Subset(dataset, range(1, 7))
    for wrapped, images in (
        (rest, [*range(1, 7)]),
        (parts[1], parts[1].indices),
        (Subset(rest, [0, 2, 4]), [1, 3, 5]),
        (ConcatDataset([dataset, dataset]), [*range(7), *range(7)]),
        (StackDataset(image=Subset(dataset, range(5)), number=range(5)), [*range(5)]),
    ):
        sampler = BucketBatchSampler(dataset.bucket_indices[images], 4, **options)
        with pytest.raises(
            KohyaBucketError,
            match=r"^the loader reads a (Subset|ConcatDataset), which .*give the dataset itself and repeats",
        ):
            list(loader(wrapped, batch_sampler=sampler))
    dataset = BucketedDataset.from_folder(folder, RULE)
    stacked = StackDataset(image=dataset, number=range(len(dataset)))  # hands indices on as they are
    sampler = BucketBatchSampler(dataset.bucket_indices, 4, **options)
    trained = list(loader(stacked, batch_sampler=sampler))
    assert sorted(i for batch in trained for i in batch["number"].tolist()) == [*range(7)]
    # A plan that moves nothing needs no bucket.
    kept = BucketBatchSampler(dataset.bucket_indices[rest.indices], 4)
    assert sum(len(batch["path"]) for batch in loader(Subset(dataset, rest.indices), batch_sampler=kept)) == 6


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
