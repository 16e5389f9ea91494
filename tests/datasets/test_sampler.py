"""The sampler in one process: torch's and torchdata's loaders, epochs, positions."""

import copy
import json
import pickle
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from kohya_bucket import BucketBatchSampler, KohyaBuckets
from kohya_bucket.datasets.planned_index import PlannedIndex, bucket_of
from kohya_bucket.errors import PlanError, ResumeError
from kohya_bucket.planning import plan_epoch
from tests.thinned import one_in
from tests.warm import QUICK

IDS = np.random.RandomState(3).choice(5, 103, p=[0.5, 0.3, 0.1, 0.07, 0.03])


class Numbers(Dataset):
    """Item i is i, so that batches show what was drawn."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([int(index), bucket_of(index, int(IDS[index]))])


def epoch_of(loader) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in loader]


def planned(epoch: int, batch: int = 4, **options) -> list[list[int]]:
    return list(plan_epoch(IDS, batch, epoch=epoch, **options).rank_batches(0))


def test_epochs_follow_each_other_and_can_be_chosen() -> None:
    sampler = BucketBatchSampler(IDS, 4)
    assert list(sampler) == planned(0)
    assert list(sampler) == planned(1)
    sampler.set_epoch(7)
    assert sampler.epoch == 7
    assert list(sampler) == planned(7)
    sampler.set_epoch(7)
    assert list(sampler) == planned(7)
    next(iter(sampler))
    assert list(sampler) == planned(8)
    assert len(sampler) == len(planned(9))


def test_the_first_epoch_begins_with_the_batch_that_costs_most() -> None:
    sizes = {"bucket_sizes": [(64, 64), (64, 128), (128, 64), (64, 192), (192, 192)]}
    usual = [planned(epoch, **sizes) for epoch in range(2)]
    costs = [len(batch) * int(np.prod(sizes["bucket_sizes"][IDS[batch[0]]])) for batch in usual[0]]
    first = int(np.argmax(costs))
    expected = [usual[0][first], *usual[0][:first], *usual[0][first + 1 :]]
    sampler = BucketBatchSampler(IDS, 4, **sizes)
    assert first > 0
    assert [list(sampler), list(sampler)] == [expected, usual[1]]
    sampler.set_epoch(0)
    for step in (1, first, first + 1, len(expected)):
        resumed = BucketBatchSampler(IDS, 4, **sizes)
        resumed.load_state_dict(sampler.state_dict(step=step))
        assert list(resumed) == (expected[step:] or usual[1])
    assert list(BucketBatchSampler(IDS, 4, largest_first=False, **sizes)) == usual[0]
    assert list(BucketBatchSampler(IDS, 4, shuffle=False, **sizes)) == planned(0, order="file", **sizes)


def test_arguments() -> None:
    with pytest.warns(UserWarning, match="2 images"):
        full = list(BucketBatchSampler(IDS, 4, drop_last=True))
    assert full == planned(0, remainder="drop", small_buckets="drop")
    assert list(BucketBatchSampler(IDS, 4, shuffle=False)) == planned(0, order="file")
    assert list(BucketBatchSampler(IDS.tolist(), 4, seed=5)) == planned(0, seed=5)
    both = [BucketBatchSampler(IDS, 2, num_replicas=2, rank=r) for r in range(2)]
    plan = plan_epoch(IDS, 2, world_size=2)
    for rank, sampler in enumerate(both):
        assert len(sampler) == plan.steps
        assert list(sampler) == list(plan.rank_batches(rank))
    with pytest.raises(PlanError, match="rank is 2"):
        BucketBatchSampler(IDS, 4, num_replicas=2, rank=2)
    with pytest.raises(PlanError, match="belong together"):
        BucketBatchSampler(IDS, 4, rank=0)
    with pytest.raises(PlanError, match="batch_size is 0"):
        BucketBatchSampler(IDS, 0)
    assert BucketBatchSampler(IDS, 4).ledger().text == "103 images, 0 missed, 0 repeated"


def test_a_data_set_brings_its_buckets() -> None:
    class WithBuckets:
        bucket_set = KohyaBuckets(512).bucket_set
        bucket_indices = np.zeros(10, dtype=np.int32)

    sampler = BucketBatchSampler(WithBuckets(), max_pixels=4 * 256 * 832)
    assert [len(b) for b in sampler] == [4, 4, 2]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_data_loader(workers: int, context: str) -> None:
    if workers == 0 and context == "fork":
        pytest.skip("without workers there is no way to start them")
    if context not in torch.multiprocessing.get_all_start_methods():
        pytest.skip(f"this platform has no {context}")
    options = {"multiprocessing_context": context, "persistent_workers": True} if workers else {}
    sampler = BucketBatchSampler(IDS, 4)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, **options)
    assert epoch_of(loader) == planned(0)
    assert epoch_of(loader) == planned(1)


@pytest.mark.parametrize("stop", [0, 1, 10, "end"])
def test_resume(stop) -> None:
    full = planned(3)
    stop = len(full) if stop == "end" else stop
    first = BucketBatchSampler(IDS, 4)
    first.set_epoch(3)
    reader = iter(first)
    assert [next(reader) for _ in range(stop)] == full[:stop]
    state = json.loads(json.dumps(first.state_dict()))
    second = BucketBatchSampler(IDS, 4, seed=99)
    second.load_state_dict(state)
    if stop < len(full):
        assert (second.epoch, second.seed) == (3, 0)
        second.set_epoch(3)
        assert len(second) == len(full)
        assert list(second) == full[stop:]
    assert list(second) == planned(4)
    assert second.state_dict()["epoch"] == 5


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("n", [1, 4, 103])
def test_the_last_batch_ends_the_epoch(n: int, workers: int) -> None:
    """Many loops ask for as many batches as there are, and not for one beyond the last."""
    ids, sampler = IDS[:n], BucketBatchSampler(IDS[:n], 4)
    options = {"num_workers": workers, "multiprocessing_context": QUICK if workers else None}
    loader = DataLoader(list(range(n)), batch_sampler=sampler, **options)
    for epoch in range(3):
        seen = [batch.tolist() for batch in islice(loader, len(loader))]
        assert seen == list(plan_epoch(ids, 4, epoch=epoch).rank_batches(0))
        again = BucketBatchSampler(ids, 4)
        again.load_state_dict(sampler.state_dict())
        assert (again.epoch, again.plan().first_step) == (epoch + 1, 0)
    together = zip(range(len(loader)), loader, strict=False)  # asks for one batch less
    assert [batch.tolist() for _, batch in together] == list(plan_epoch(ids, 4, epoch=3).rank_batches(0))
    assert sampler.epoch == 4


@pytest.mark.long
def test_the_step_that_was_trained_can_be_named() -> None:
    sampler = BucketBatchSampler(IDS, 4)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=1, multiprocessing_context=QUICK)
    read = []
    for step, batch in enumerate(loader, 1):
        read.append(batch[:, 0].tolist())
        if step == len(planned(0)) - 1:
            state = sampler.state_dict(step=step)
    # The worker had read to the end of the epoch by then.
    assert sampler.state_dict()["epoch"] == 1
    assert sampler.state_dict(step=len(read))["epoch"] == 1
    rest = BucketBatchSampler(IDS, 4)
    rest.load_state_dict(state)
    assert list(rest) == planned(0)[-1:]


def test_resume_with_another_global_batch() -> None:
    sampler = BucketBatchSampler(IDS, 4)
    reader = iter(sampler)
    seen = [i for _ in range(9) for i in next(reader)]
    for batch_size, reads in ((6, 4), (3, 5)):
        state = sampler.state_dict()
        sampler = BucketBatchSampler(IDS, batch_size)
        sampler.load_state_dict(state)
        reader = iter(sampler)
        seen += [i for _ in range(reads) for i in next(reader)]
    assert sampler.state_dict()["done"] == [[4, 9, 1], [6, 4, 1], [3, 5, 1]]
    seen += [i for batch in reader for i in batch]
    assert sorted(seen) == list(range(len(IDS)))
    assert list(sampler) == planned(1, 3)


@pytest.mark.parametrize("workers", one_in(2, [0, 2]))
@pytest.mark.parametrize("stop", [3, "last", "end"])
def test_stateful_data_loader(workers: int, stop) -> None:
    import torchdata.stateful_dataloader as stateful

    def make():
        return stateful.StatefulDataLoader(
            Numbers(),
            batch_sampler=BucketBatchSampler(IDS, 4),
            num_workers=workers,
            multiprocessing_context=QUICK if workers else None,
        )

    full, first = planned(0), make()
    reader = iter(first)
    steps = 3 if stop == 3 else len(full)
    assert [next(reader)[:, 0].tolist() for _ in range(steps)] == full[:steps]
    if stop == "end":
        assert next(reader, None) is None
    state = first.state_dict()
    second = make()
    second.load_state_dict(state)
    if stop == 3:
        assert epoch_of(second) == full[steps:]
    assert epoch_of(second) == planned(1)


def nodes_of(kind: str, sampler: BucketBatchSampler, prebatch: int | None = None):
    """A loader of torchdata's nodes, read in threads or not."""
    from torchdata import nodes

    node = nodes.IterableWrapper(sampler) if kind == "iterable" else nodes.SamplerWrapper(sampler)
    if kind == "parallel":
        node = nodes.ParallelMapper(node, list, num_workers=2, method="thread", prebatch=prebatch)
    return nodes.Loader(nodes.Prefetcher(node, 3) if kind == "prefetched" else node)


def stateful_of(sampler: BucketBatchSampler):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(range(len(IDS)), batch_sampler=sampler, collate_fn=list)


class Plain:
    """A loop without a loader, which saves what it has read, or what it says that it has trained."""

    def __init__(self, sampler: BucketBatchSampler, *, told: bool = False, counted: bool = False) -> None:
        self.sampler, self.told, self.counted, self.step = sampler, told, counted, 0
        self.load_state_dict = sampler.load_state_dict

    def __iter__(self):
        if self.counted:  # a loop that names each epoch
            self.sampler.set_epoch(self.sampler.epoch)
        self.step = self.sampler.plan().first_step
        for batch in self.sampler:
            self.step += 1
            yield batch

    def state_dict(self):
        return self.sampler.state_dict(self.step if self.told else None)


CARRIERS = {
    "read": Plain,
    "told": partial(Plain, told=True),
    "counted": partial(Plain, counted=True),
    "stateful": stateful_of,
    **{kind: partial(nodes_of, kind) for kind in ("node", "iterable", "parallel", "prefetched")},
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    "carrier",
    [pytest.param(one, marks=[pytest.mark.long] * (one in ("parallel", "prefetched"))) for one in CARRIERS],
)
@given(epochs=st.integers(0, 2), batches=st.integers(0, 9), size=st.sampled_from([16, 30]), beyond=st.booleans())
def test_wherever_a_state_is_saved_the_next_batch_follows(
    carrier: str, epochs: int, batches: int, size: int, beyond: bool
) -> None:
    """Also at the end of an epoch, and before the first batch of the next one is asked for."""
    pytest.importorskip("torchdata")
    left = [batch for epoch in range(8) for batch in planned(epoch, size)]
    lasts = [planned(epoch, size)[-1] for epoch in range(8)]

    def took(batches) -> list[list[int]]:
        got = [list(batch) for batch in batches]
        assert got == left[: len(got)]
        del left[: len(got)]
        return got

    state = None
    for _ in range(2):
        loader = CARRIERS[carrier](BucketBatchSampler(IDS, size))
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(epochs):
            assert took(loader)[-1] in lasts
        reader = iter(loader)
        got = took(islice(reader, batches))
        if beyond and got and got[-1] in lasts:
            assert next(reader, None) is None
        state = copy.deepcopy(loader.state_dict())
        del reader
    loader = CARRIERS[carrier](BucketBatchSampler(IDS, size))
    loader.load_state_dict(state)
    for _ in range(2):
        assert took(loader)[-1] in lasts


@pytest.mark.long
@pytest.mark.parametrize(("batches", "beyond"), [(0, False), (1, False), (3, False), (6, False), (7, False), (7, True)])
def test_the_end_of_an_epoch_of_nodes_that_batch_twice_is_refused(batches: int, beyond: bool) -> None:
    """Of seven batches, put together by three; elsewhere they go on."""
    pytest.importorskip("torchdata")
    loader = nodes_of("parallel", BucketBatchSampler(IDS, 30), prebatch=3)
    assert [list(batch) for batch in loader] == planned(0, 30)
    reader = iter(loader)
    assert list(map(list, islice(reader, batches))) == planned(1, 30)[:batches]
    if beyond:
        assert next(reader, None) is None
    state = copy.deepcopy(loader.state_dict())
    resumed = nodes_of("parallel", BucketBatchSampler(IDS, 30), prebatch=3)
    resumed.load_state_dict(state)
    if batches == 7:
        with pytest.raises(PlanError, match=r"at the end of epoch 1, .*SamplerWrapper\(sampler, initial_epoch=2\)"):
            iter(resumed)
    else:
        assert [list(map(list, resumed)) for _ in range(2)] == [planned(1, 30)[batches:], planned(2, 30)]


@pytest.mark.long
def test_moved_images_say_where_they_go() -> None:
    sampler = BucketBatchSampler(IDS, 4, remainder="catch_all", base_bucket=0)
    plan = sampler.plan()
    for step, batch in enumerate(sampler):
        assert {i.bucket for i in batch} == {int(plan.bucket_of_step[step])}
    copy = pickle.loads(pickle.dumps(PlannedIndex(7, 3)))
    assert (copy, copy.bucket, bucket_of(copy, 1), bucket_of(7, 1)) == (7, 3, 3, 1)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=1, multiprocessing_context=QUICK)
    assert all(len(set(batch[:, 1].tolist())) == 1 for batch in loader)


def test_steps_counted_over_all_epochs_are_no_position() -> None:
    sampler = BucketBatchSampler(IDS, 4)
    steps = len(list(sampler))
    next(iter(sampler))
    with pytest.raises(PlanError, match=f"step is {steps + 1}, but epoch 1 has {steps} steps: count from the start"):
        sampler.state_dict(step=steps + 1)
    with pytest.raises(PlanError, match=r"step is 2\.5"):
        sampler.state_dict(step=2.5)
    assert sampler.state_dict(step=steps)["epoch"] == 2
    fresh = BucketBatchSampler(IDS, 4)
    with pytest.raises(PlanError, match=f"epoch 0 has {steps} steps"):
        fresh.state_dict(step=10**6)


def test_arguments_that_contradict_each_other() -> None:
    for options in ({"drop_last": True, "remainder": "keep"}, {"drop_last": False, "remainder": "drop"}):
        with pytest.raises(PlanError, match=f"drop_last={options['drop_last']} and remainder=.* contradict"):
            BucketBatchSampler(IDS, 4, **options)
    with pytest.raises(PlanError, match="shuffle=False and order='shuffled' contradict"):
        BucketBatchSampler(IDS, 4, shuffle=False, order="shuffled")
    assert BucketBatchSampler(IDS, 4, drop_last=False, remainder="pad").plan().ledger().missed == 0


def test_numbers_of_other_types() -> None:
    sampler = BucketBatchSampler(IDS, 4, seed=np.int64(3), num_replicas=np.int32(2), rank=np.int8(1))
    sampler.set_epoch(np.int64(2))
    assert json.loads(json.dumps(sampler.state_dict()))["seed"] == 3
    for options in ({"seed": None}, {"seed": 1.5}, {"num_replicas": "2", "rank": 0}, {"rank": "1", "num_replicas": 2}):
        with pytest.raises(PlanError, match=f"{next(iter(options))} is"):
            BucketBatchSampler(IDS, 4, **options)
    for epoch in (-1, 1.5, "2"):
        with pytest.raises(PlanError, match=f"epoch is {epoch!r}"):
            sampler.set_epoch(epoch)


@pytest.mark.parametrize("change", [{"fingerprint": 3}, {"done": "x"}, {"done": [[4]]}, {"seed": None}])
def test_damaged_positions_are_refused(change: dict) -> None:
    sampler = BucketBatchSampler(IDS, 4)
    with pytest.raises(ResumeError, match="is damaged"):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    with pytest.raises(PlanError, match="1000000 steps are done, but the epoch has only 28"):
        sampler.load_state_dict({**sampler.state_dict(), "done": [[4, 10**6, 1]], "step": 10**6})
    assert list(sampler) == planned(0)
    with pytest.raises(ResumeError, match="not a saved position but a NoneType"):
        sampler.load_state_dict(None)


class Named:
    """A dataset of 12 images of one bucket, as far as a sampler asks."""

    bucket_indices = np.zeros(12, dtype=int)

    def __init__(self, names: list[str]) -> None:
        self.image_names = names


def test_a_position_is_for_the_same_images_in_the_same_order() -> None:
    names = [f"/data/photos/{i:02}.png" for i in range(12)]

    def sampler(names: list[str] | None) -> BucketBatchSampler:
        return BucketBatchSampler(Named.bucket_indices if names is None else Named(names), 2, seed=5)

    state = json.loads(json.dumps(sampler(names).state_dict(step=2)))
    others = names[::-1], [*names[:5], "/data/photos/05b.png", *names[6:]], [names[1], names[0], *names[2:]]
    for other in others:
        with pytest.raises(ResumeError, match="images have other names or are in another order"):
            sampler(other).load_state_dict(state)
    without = {**state, "fingerprint": {k: v for k, v in state["fingerprint"].items() if k != "image_names"}}
    unknown = sampler(None).state_dict(step=2)
    moved = [name.replace("/data/", "/mnt/") for name in names]
    # A folder that was moved; states of samplers that did not know names, and samplers that do not.
    for loaded, now in ((state, moved), (without, names), (unknown, names), (state, None), (unknown, None)):
        goes_on = sampler(now)
        goes_on.load_state_dict(loaded)
        assert goes_on.plan().first_step == 2
