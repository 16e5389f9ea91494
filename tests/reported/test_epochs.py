"""Epochs that miss or repeat images"""

from collections import Counter
from itertools import islice

import pytest
from accelerate import skip_first_batches
from torch.utils.data import DataLoader

from kohya_bucket import BucketBatchSampler
from kohya_bucket.planning import plan_epoch
from tests.datasets.accelerated_rank import IDS, lists, prepared
from tests.datasets.stream_ranks import N, started
from tests.reported.case import reported

RANKS = 2


def planned(epoch: int, rank: int, begin: int = 0) -> list[list[int]]:
    return list(plan_epoch(IDS, 4, world_size=RANKS, epoch=epoch).rank_batches(rank, begin))


def made(rank: int, stateful: bool = True) -> tuple:
    sampler = BucketBatchSampler(IDS, 4)
    return sampler, prepared(sampler, RANKS, rank, **({"use_stateful_dataloader": True} if stateful else {}))


@reported(
    "transformers' Trainer with a batch sampler of one's own, `resume_from_checkpoint` in mid-epoch: other images",
    trainer="accelerate's `skip_first_batches` and `set_epoch` reach no custom batch sampler: another epoch's order",
    here="0 missed, 0 repeated, on 1 and 2 processes (4.54, 5.24); a loader that is not prepared is refused in 4.54",
    command="pytest -m '' tests/datasets/test_trainers_of_others.py",
    origin="the batches of an epoch without a stop",
)
@pytest.mark.parametrize("rank", range(RANKS))
def test_batches_are_skipped_in_the_epoch_that_a_loop_names(rank: int) -> None:
    sampler, loader = made(rank, stateful=False)
    rest = skip_first_batches(loader, 3)
    rest.set_epoch(2)
    assert lists(rest) == planned(2, rank, 3)
    assert lists(loader) == planned(3, rank)
    assert sampler.epoch == 4


@reported(
    "a loop that takes `len(loader)` batches and no more: the same order in every epoch",
    trainer="a sampler that moves on when it is asked for one batch beyond the last never does",
    here="the last batch ends the epoch (Lightning, transformers' Trainer, `zip`, `islice`)",
    command="pytest tests/datasets/test_sampler.py",
    origin="the plan of each epoch",
)
def test_epochs_differ_where_nobody_asks_beyond_the_last_batch() -> None:
    loader = DataLoader(list(range(len(IDS))), batch_sampler=BucketBatchSampler(IDS, 4))
    epochs = [[batch.tolist() for batch in islice(loader, len(loader))] for _ in range(3)]
    assert epochs == [list(plan_epoch(IDS, 4, epoch=epoch).rank_batches(0)) for epoch in range(3)]


@reported(
    "`use_stateful_dataloader=True`, resumed in a later epoch: right position, order of epoch 0",
    "huggingface/accelerate#4195",
    "huggingface/accelerate#3996",
    trainer="accelerate does not save the order: images of the epoch are missed, and others trained twice",
    here="0 missed, 0 repeated, on 1 to 3 processes, in any epoch",
    command="pytest -m '' tests/datasets/test_epochs_resumed.py",
    origin="the batches of an epoch without a stop",
)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_stateful_loader_goes_on_in_the_order_of_its_epoch(rank: int) -> None:
    _, loader = made(rank)
    for epoch in range(4):
        assert lists(loader) == planned(epoch, rank)
    reader = iter(loader)
    before = [next(reader).tolist() for _ in range(4)]
    _, resumed = made(rank)
    resumed.load_state_dict(loader.state_dict())
    assert before + lists(resumed) == planned(4, rank)
    assert lists(resumed) == planned(5, rank)


@reported(
    "`save_state` and `load_state` with `shuffle=True`: another order after the resume",
    "huggingface/accelerate#3158",
    "huggingface/accelerate#2016",
    "huggingface/accelerate#2823",
    trainer="accelerate goes on as if it were the first epoch, whatever `set_epoch` was told",
    here="with the sampler registered, the image after the last trained one",
    command="accelerator.register_for_checkpointing(sampler)",
    origin="the batches of an epoch without a stop",
)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_registered_sampler_goes_on_at_the_exact_image(rank: int) -> None:
    sampler, loader = made(rank, stateful=False)
    sampler.set_epoch(3)
    trained = []
    for stop in (2, 5, 9):  # several times in one epoch
        for batch in loader:
            trained.append(batch.tolist())
            if len(trained) == stop:
                break
        state = sampler.state_dict()
        sampler, loader = made(rank, stateful=False)
        sampler.load_state_dict(state)
    assert trained + lists(loader) == planned(3, rank)
    assert lists(loader) == planned(4, rank)


@pytest.mark.long
@reported(
    "a state that was saved at the end of an epoch drops the next epoch",
    "meta-pytorch/data#1437",
    trainer="torchdata's loader has another state after it has loaded one",
    here="goes on with the first batch of the next epoch",
    command="pytest -m '' tests/reported/test_epochs.py",
    origin="the batches of the next epoch",
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_from_the_end_of_an_epoch(workers: int) -> None:

    def loader_of_one_process() -> DataLoader:
        return prepared(BucketBatchSampler(IDS, 40), workers=workers, use_stateful_dataloader=True)

    loader = loader_of_one_process()  # so few batches that they are all read ahead
    for _ in loader:
        last = loader.state_dict()
    for state in (last, loader.state_dict()):
        once, resumed = loader_of_one_process(), loader_of_one_process()
        once.load_state_dict(state)
        resumed.load_state_dict(once.state_dict())
        assert lists(resumed) == list(plan_epoch(IDS, 40, epoch=1).rank_batches(0))


@reported(
    "a batch sampler of varying batch sizes works on one GPU, and not on several",
    "huggingface/accelerate#207",
    trainer="accelerate's wrapper drops each group of batches whose last one is not full",
    here="every process reads its own batches, short ones too; `accelerator.prepare` is refused",
    command="kohya_bucket.prepare_loader(accelerator, loader)",
    origin="each image once",
)
def test_short_batches_are_not_lost() -> None:
    plan = plan_epoch(IDS, 4, world_size=RANKS)
    counts = Counter(i for rank in range(RANKS) for batch in lists(made(rank, stateful=False)[1]) for i in batch)
    counts.subtract(plan.ledger().image.tolist())
    assert counts == dict.fromkeys(range(len(IDS)), 1)
    assert int(plan.length.min()) < 4 * RANKS


@reported(
    "`gather_for_metrics` ignores images of the last batch",
    "huggingface/accelerate#952",
    trainer="accelerate cuts off what it believes was added to fill the last batch, by the number of images alone",
    here="nothing is added to a batch, and nothing is cut off",
    command="kohya_bucket.prepare_loader(accelerator, loader)",
    origin="accelerate's own value for a loader that adds nothing",
)
def test_metrics_are_gathered_of_all_images() -> None:
    from accelerate.state import GradientState

    _, loader = made(0, stateful=False)
    for _ in loader:
        remainder = GradientState().remainder  # what gather_for_metrics reads
    assert (remainder, len(IDS) % (4 * RANKS)) == (-1, 7)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """What two processes of a gloo group read of streams."""
    return started(tmp_path_factory.mktemp("streams"), RANKS, 0, False)


@reported(
    "an IterableDataset under DDP: every rank trains all samples",
    "huggingface/datasets#5360",
    "huggingface/datasets#3423",
    trainer="no rank knows of the others unless the stream is split by hand",
    here="`StreamingBuckets` takes its rank from torch.distributed: each image once, the same steps on all ranks",
    command="StreamingBuckets(stream, rule, batch_size)",
    origin="each image once",
)
@pytest.mark.weekly
def test_ranks_share_a_stream(streams: dict[str, list[dict]]) -> None:
    for case in {"whole", "whole, in its order", "hf seeded"} & set(streams):
        assert [row["refused"] for row in streams[case]] == ["", ""]
        steps = zip(*(row["trained"] for row in streams[case]), strict=True)
        # of two epochs; a short batch may repeat an image of its own, so that no rank is empty
        seen = Counter(image for step in steps for image in {i for batch in step for i in batch})
        assert seen == dict.fromkeys(range(N), 2)
    for row in streams["alone"]:  # who says that it is alone reads alone
        assert sorted(i for batch in row["trained"] for i in batch) == sorted([*range(N)] * 2)


@reported(
    "a stream is shuffled without a seed: samples are duplicated and missed",
    "huggingface/datasets#5696",
    "huggingface/datasets#7163",
    trainer="each process draws a seed of its own",
    here="all ranks stop before the first batch: `rank 1 reads another stream than rank 0`",
    command="StreamingBuckets.from_hf(stream, rule, batch_size)",
    origin="no batch is trained",
)
@pytest.mark.slow
def test_ranks_that_read_in_another_order_stop(streams: dict[str, list[dict]]) -> None:
    for case in ("unseeded", "unseeded, in its order", "hf unseeded"):
        for row in streams.get(case, []):
            assert row["trained"] == []
            assert "rank 1 reads another stream than rank 0" in row["refused"]
            assert "shuffle it with the same seed on all ranks" in row["refused"]
    for row in streams["seeds"]:
        assert row["trained"] == []
        assert "seed was 0, now 1" in row["refused"]
    for row in streams["changes later"]:
        assert "what the images are, in their order" in row["refused"]


@reported(
    "a stream is split by rank: ranks take different numbers of steps, and DDP hangs",
    "huggingface/datasets#6437",
    trainer="`split_dataset_by_node` gives ranks unequal numbers of samples",
    here="all ranks stop before the first batch, since each is to read the whole stream",
    command="StreamingBuckets.from_hf(stream, rule, batch_size)",
    origin="no batch is trained",
)
@pytest.mark.slow
def test_a_stream_that_is_split_already_is_refused(streams: dict[str, list[dict]]) -> None:
    for case in ("split", "hf split"):
        for row in streams.get(case, []):
            assert row["trained"] == []
            assert "do not split it by rank" in row["refused"]
