"""`prepare_loader` and accelerate's loaders, rank by rank in one process."""

from itertools import product
from types import SimpleNamespace

import accelerate.data_loader as accelerate_loader
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from kohya_bucket import BucketBatchSampler, prepare_loader
from kohya_bucket.errors import PlanError, ResumeError
from kohya_bucket.planning import plan_epoch
from tests.datasets.accelerated_rank import IDS, accelerator_of, lists, prepared


@pytest.mark.long
@given(
    n=st.integers(1, 80),
    ranks=st.integers(1, 9),
    batch=st.integers(1, 6),
    even=st.booleans(),
    remainder=st.sampled_from(["keep", "pad", "drop"]),
)
def test_no_batch_and_no_epoch_is_lost(n: int, ranks: int, batch: int, even: bool, remainder: str) -> None:
    ids = IDS[:n]
    for rank in range(ranks):
        loader = prepared(BucketBatchSampler(ids, batch, remainder=remainder), ranks, rank, even_batches=even)
        for epoch in range(3):
            plan = plan_epoch(ids, batch, world_size=ranks, epoch=epoch, remainder=remainder)
            assert len(loader) == plan.steps
            assert lists(loader) == list(plan.rank_batches(rank))


def test_the_prepared_loader_counts_on_after_a_resume() -> None:
    sampler = BucketBatchSampler(IDS, 4)
    sampler.set_epoch(3)
    reader = iter(sampler)
    for _ in range(5):
        next(reader)
    state = sampler.state_dict()

    resumed = BucketBatchSampler(IDS, 4)
    resumed.load_state_dict(state)
    loader = prepared(resumed)
    # accelerate believes that these are the epochs 0 and 1, and tells the loader so.
    for epoch, skipped in ((3, 5), (4, 0)):
        assert lists(loader) == list(plan_epoch(IDS, 4, epoch=epoch).rank_batches(0, skipped))
    loader.set_epoch(9)
    assert resumed.epoch == 9
    assert lists(loader) == list(plan_epoch(IDS, 4, epoch=9).rank_batches(0))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_accelerates_own_loader_has_this_one_has(ranks: int) -> None:
    plain = DataLoader(list(range(len(IDS))), batch_sampler=BatchSampler(SequentialSampler(IDS), 4, False))
    theirs = accelerator_of(ranks, ranks - 1).prepare_data_loader(plain)
    sampler = BucketBatchSampler(IDS, 4)
    ours = prepared(sampler, ranks, ranks - 1)
    for own, other in ((ours, theirs), (ours.batch_sampler, theirs.batch_sampler)):
        names = {name for name in (*dir(type(other)), *vars(other)) if not name.startswith("_")}
        assert not [name for name in names if not hasattr(own, name)]
        values = {name: getattr(other, name) for name in names if type(getattr(other, name)) in (int, bool)}
        values.pop("total_length", None)  # of batches, which are others here
        assert {name: getattr(own, name) for name in values} == values
    assert ours.total_batch_size == 4 * ranks
    assert ours.batch_sampler.total_length == ranks * len(ours)
    assert ours.get_sampler() is ours.batch_sampler.sampler is sampler
    ours.set_epoch(5)
    assert (sampler.epoch, ours.iteration) == (5, 5)


def test_a_loader_is_known_to_every_accelerator_that_prepared_it() -> None:
    from accelerate import Accelerator

    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    loader = prepare_loader(first, DataLoader(list(range(len(IDS))), batch_sampler=BucketBatchSampler(IDS, 4)))
    assert prepare_loader(second, loader) is loader
    assert [one._dataloaders == [loader] for one in (first, second)] == [True, True]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_is_that_of_what_was_handed_out(workers: int) -> None:
    """As `register_for_checkpointing` saves it: accelerate's loader has read the next step already."""
    sampler = BucketBatchSampler(IDS, 4)
    loader = prepared(sampler, workers=workers)
    sampler.load_state_dict(sampler.state_dict(step=2))
    for trained, _ in enumerate(loader, 3):
        if trained in (3, 7):
            assert sampler.state_dict() == sampler.state_dict(step=trained)
            assert sampler.state_dict()["step"] == trained
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["step"]) == (1, 0)


@pytest.mark.parametrize("told", [True, False])
def test_skipped_batches(told: bool) -> None:
    """accelerate's own way to resume makes another loader, which nobody counts for; it or the sampler is told where."""
    sampler = BucketBatchSampler(IDS, 4)
    loader = prepared(sampler)
    if not told:
        sampler.set_epoch(2)
    rest = accelerate_loader.skip_first_batches(loader, 7)
    if told:
        rest.set_epoch(2)
    reader = iter(rest)
    first = next(reader).tolist()
    with pytest.raises(PlanError, match=r"read more steps than are trained.*state_dict\(step=…\)"):
        sampler.state_dict()
    assert sampler.state_dict(step=8)["step"] == 8
    assert [first, *lists(reader)] == list(plan_epoch(IDS, 4, epoch=2).rank_batches(0, 7))
    assert lists(loader) == list(plan_epoch(IDS, 4, epoch=3).rank_batches(0))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.weekly)])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_stateful_loader_goes_on_where_it_was(ranks: int, rank: int, workers: int) -> None:
    """`DataLoaderConfiguration(use_stateful_dataloader=True)`: the loader's own state is enough, in any epoch."""

    def made() -> tuple[BucketBatchSampler, DataLoader]:
        sampler = BucketBatchSampler(IDS, 4)
        return sampler, prepared(sampler, ranks, rank, workers, use_stateful_dataloader=True)

    plans = [plan_epoch(IDS, 4, world_size=ranks, epoch=epoch) for epoch in range(3)]
    expected = [list(plan.rank_batches(rank)) for plan in plans]
    _, loader = made()
    assert lists(loader) == expected[0]
    reader = iter(loader)
    assert [next(reader).tolist() for _ in range(5)] == expected[1][:5]
    middle = loader.state_dict()
    list(reader)
    for state, begin in ((middle, (1, 5)), (loader.state_dict(), (2, 0))):
        sampler, resumed = made()
        resumed.load_state_dict(state)
        assert (sampler.plan().epoch, sampler.plan().first_step) == begin
        again, once_more = made()
        once_more.load_state_dict(resumed.state_dict())  # saved before it went on
        assert again.state_dict() == sampler.state_dict()
        assert lists(resumed) == expected[begin[0]][begin[1] :]
        sampler.set_epoch(0)
        assert lists(resumed) == expected[0]
    sampler, resumed = made()
    resumed.load_state_dict(middle)
    sampler.set_epoch(2)  # what is told last counts
    assert lists(resumed) == expected[2]


def test_what_would_tear_batches_apart_is_refused() -> None:
    for ranks, dealt in (
        (1, {}),
        (2, {}),
        (2, {"split_batches": True}),
        (2, {"dispatch_batches": True, "put_on_device": True}),
    ):
        plain = DataLoader(list(range(len(IDS))), batch_sampler=BucketBatchSampler(IDS, 4))
        loader = accelerator_of(ranks, **dealt).prepare_data_loader(plain)
        for wrapped in (loader, accelerate_loader.skip_first_batches(loader, 2)):
            with pytest.raises(PlanError, match=r"kohya_bucket\.prepare_loader\(accelerator, loader\)"):
                next(iter(wrapped))
            wrapped.end()
    with pytest.raises(PlanError, match=r"num_replicas is 4 and rank is 0, but accelerate runs 2 processes"):
        prepared(BucketBatchSampler(IDS, 4, num_replicas=4, rank=0), 2)
    for option in ("split_batches", "dispatch_batches"):
        with pytest.raises(PlanError, match=f"accelerate is set to {option}=True.*leave {option} out"):
            prepare_loader(SimpleNamespace(**{option: True}), plain)
    with pytest.raises(PlanError, match=r"batch sampler is a BatchSampler.*give the loader to accelerator\.prepare"):
        prepared(BatchSampler(SequentialSampler(IDS), 4, False))


TOUCHES = {
    "as it is": lambda loader: loader,
    "a state saved": lambda loader: loader.state_dict(),
    "a state loaded": lambda loader: loader.load_state_dict({}),
    "its length asked": len,
}


def dealt_again(workers: int, images: int, touch: str, skip: int, **options: object) -> None:
    """The first batch of a loader that accelerate's own `prepare` made."""
    sampler, ranks, rank = BucketBatchSampler(IDS[:images], 6), options.pop("ranks"), options.pop("rank")
    plain = DataLoader(list(range(images)), batch_sampler=sampler, num_workers=workers)
    loader = accelerator_of(ranks, rank, **options).prepare_data_loader(plain)
    TOUCHES[touch](loader)
    wrapped = accelerate_loader.skip_first_batches(loader, skip) if skip else loader
    try:
        next(iter(wrapped))
    finally:
        wrapped.end()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of iterators that were never whole
@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("dealt", ["", "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler"])
def test_batches_are_dealt_out_once_in_whatever_order_they_are_read(dealt: str, touch: str) -> None:
    """Also where a loader with workers has read a whole epoch before it is iterated."""
    options = {dealt: dealt != "even_batches"} if dealt else {}
    if dealt == "dispatch_batches":
        options["put_on_device"] = True
    for (ranks, rank), workers, images, skip, stateful in product(
        [(1, 0), (2, 0), (2, 1), (3, 2)], [0, 2], [len(IDS), 6], [0, 2], [False, True]
    ):
        if workers and (skip or dealt or rank == 2):
            continue
        if stateful or touch in ("as it is", "its length asked"):
            with pytest.raises(PlanError, match=r"kohya_bucket\.prepare_loader\(accelerator, loader\)"):
                dealt_again(
                    workers, images, touch, skip, ranks=ranks, rank=rank, use_stateful_dataloader=stateful, **options
                )


@pytest.mark.parametrize("named", ["", "set_epoch", "load_state_dict", "begun"])
def test_batches_are_skipped_in_no_epoch_that_nobody_named(named: str) -> None:
    """A plain loader, of which `skip_first_batches` leaves out some: by itself it would begin with epoch 0."""
    sampler, epoch = BucketBatchSampler(IDS, 4), 0
    if named == "set_epoch":
        sampler.set_epoch(epoch := 3)
    if named == "load_state_dict":
        sampler.load_state_dict({**BucketBatchSampler(IDS, 4).state_dict(), "epoch": (epoch := 2)})
    if named == "begun":
        epoch = len([list(sampler)])
    rest = accelerate_loader.skip_first_batches(DataLoader(list(range(len(IDS))), batch_sampler=sampler), 5)
    if named:
        assert lists(rest) == list(plan_epoch(IDS, 4, epoch=epoch).rank_batches(0, 5))
    else:
        with pytest.raises(PlanError, match="not told in which epoch, and would begin with epoch 0: prepare the"):
            next(iter(rest))


def test_a_state_without_a_position_is_refused() -> None:
    """One that accelerate's own wrapper saved: going on from it would train another epoch's order."""
    loader = prepared(BucketBatchSampler(IDS, 4), use_stateful_dataloader=True)
    with pytest.raises(ResumeError, match=r"holds no position in a plan.*prepare_loader"):
        loader.load_state_dict({"_num_yielded": 4, "_index_sampler_state": None})


def test_a_process_that_accelerate_takes_for_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors without ACCELERATE_USE_CPU, behind torchrun."""
    monkeypatch.setattr("kohya_bucket.datasets.accelerated.world", lambda: (2, 1))
    with pytest.raises(PlanError, match="one of 2 processes, and accelerate takes it for the only one"):
        prepared(BucketBatchSampler(IDS, 4), 1, 0)
