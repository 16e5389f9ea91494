"""accelerate's wrappers around the sampler, rank by rank in one process."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

accelerate_loader = pytest.importorskip("accelerate.data_loader")

from kohya_bucket import BucketBatchSampler  # noqa: E402
from kohya_bucket.errors import PlanError  # noqa: E402
from kohya_bucket.planning import plan_epoch  # noqa: E402

IDS = np.random.RandomState(3).choice(5, 103, p=[0.5, 0.3, 0.1, 0.07, 0.03])


@given(
    n=st.integers(1, 80),
    ranks=st.integers(1, 9),
    batch=st.integers(1, 6),
    even=st.booleans(),
    remainder=st.sampled_from(["keep", "pad", "drop"]),
)
@settings(max_examples=20, deadline=None)
def test_no_batch_and_no_epoch_is_lost(n: int, ranks: int, batch: int, even: bool, remainder: str) -> None:
    ids = IDS[:n]
    for rank in range(ranks):
        sampler = BucketBatchSampler(ids, batch, remainder=remainder)
        shard = accelerate_loader.BatchSamplerShard(sampler, ranks, rank, even_batches=even)
        for epoch in range(3):
            plan = plan_epoch(ids, batch, world_size=ranks, epoch=epoch, remainder=remainder)
            assert len(shard) == plan.steps
            assert list(shard) == list(plan.rank_batches(rank))


def test_the_prepared_loader_counts_on_after_a_resume() -> None:
    sampler = BucketBatchSampler(IDS, 4)
    sampler.set_epoch(3)
    reader = iter(sampler)
    for _ in range(5):
        next(reader)
    state = sampler.state_dict()

    resumed = BucketBatchSampler(IDS, 4)
    resumed.load_state_dict(state)
    loader = accelerate_loader.prepare_data_loader(
        DataLoader(list(range(len(IDS))), batch_sampler=resumed), num_processes=1, process_index=0
    )
    # The loader believes that these are the epochs 0 and 1, and tells the sampler so.
    for epoch, skipped in ((3, 5), (4, 0)):
        assert [b.tolist() for b in loader] == list(plan_epoch(IDS, 4, epoch=epoch).rank_batches(0, skipped))
    loader.set_epoch(9)
    assert resumed.epoch == 9
    assert [b.tolist() for b in loader] == list(plan_epoch(IDS, 4, epoch=9).rank_batches(0))


def test_a_position_that_is_ahead_of_training_is_refused() -> None:
    """As `register_for_checkpointing` would save it: the loader has read the next step already."""
    sampler = BucketBatchSampler(IDS, 4)
    loader = accelerate_loader.prepare_data_loader(
        DataLoader(list(range(len(IDS))), batch_sampler=sampler), num_processes=1, process_index=0
    )
    assert sampler.state_dict()["step"] == 0
    for trained, _ in enumerate(loader, 1):
        if trained == 3:
            with pytest.raises(PlanError, match=r"read more steps than are trained.*state_dict\(step=…\)"):
                sampler.state_dict()
            assert sampler.state_dict(step=trained)["step"] == 3
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["step"]) == (1, 0)


def test_skipped_batches() -> None:
    sampler = BucketBatchSampler(IDS, 4)
    loader = accelerate_loader.prepare_data_loader(
        DataLoader(list(range(len(IDS))), batch_sampler=sampler), num_processes=1, process_index=0
    )
    sampler.set_epoch(2)
    rest = accelerate_loader.skip_first_batches(loader, 7)
    assert [b.tolist() for b in rest] == list(plan_epoch(IDS, 4, epoch=2).rank_batches(0, 7))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_stateful_loader_goes_on_where_it_was(ranks: int, rank: int, workers: int) -> None:
    """`DataLoaderConfiguration(use_stateful_dataloader=True)`: the loader's own state is enough."""
    pytest.importorskip("torchdata")

    def prepared() -> DataLoader:
        plain = DataLoader(list(range(len(IDS))), batch_sampler=BucketBatchSampler(IDS, 4), num_workers=workers)
        return accelerate_loader.prepare_data_loader(
            plain, num_processes=ranks, process_index=rank, use_stateful_dataloader=True
        )

    expected = [list(plan_epoch(IDS, 4, world_size=ranks, epoch=e).rank_batches(rank)) for e in (0, 1)]
    loader = prepared()
    assert [[b.tolist() for b in loader] for _ in range(2)] == expected
    loader = prepared()
    reader = iter(loader)
    assert [next(reader).tolist() for _ in range(5)] == expected[0][:5]
    resumed = prepared()
    resumed.load_state_dict(loader.state_dict())
    assert [b.tolist() for b in resumed] == expected[0][5:]
    assert [b.tolist() for b in resumed] == expected[1]


def test_what_would_tear_batches_apart_is_refused() -> None:
    sampler = BucketBatchSampler(IDS, 4)
    with pytest.raises(PlanError, match="use split_batches=False"):
        next(iter(accelerate_loader.BatchSamplerShard(sampler, 2, 0, split_batches=True)))
    other = BucketBatchSampler(IDS, 4, num_replicas=4, rank=0)
    with pytest.raises(PlanError, match="num_replicas is 4, but accelerate runs 2 processes"):
        next(iter(accelerate_loader.BatchSamplerShard(other, 2, 0)))
    dispatcher = accelerate_loader.DataLoaderDispatcher(list(range(len(IDS))), batch_sampler=sampler)
    dispatcher.state = SimpleNamespace(num_processes=2, process_index=0)
    with pytest.raises(PlanError, match="use dispatch_batches=False"):
        next(iter(dispatcher))
