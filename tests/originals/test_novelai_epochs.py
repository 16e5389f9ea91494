"""Laws of NovelAI's epoch; equality with the program is tested in `compat_tests/`."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import PlanError
from kohya_bucket.originals.novelai_epochs import CATCH_ALL, NovelAIEpochs

indices = st.lists(st.integers(-1, 5), min_size=1, max_size=80)


@given(indices, st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_an_epoch_trains_every_image_it_keeps_once(bucket_index, batch_size, world_size, seed) -> None:
    index = np.array(bucket_index)
    ranks = [NovelAIEpochs(index, batch_size, world_size, rank, seed) for rank in range(world_size)]
    for _ in range(3):
        trained = []
        for epochs in ranks:
            batches = list(epochs.epoch())
            assert len(batches) == epochs.batch_total
            for rows, bucket in batches:
                assert len(rows) == batch_size
                assert bucket == CATCH_ALL or (index[rows] == bucket).all()
                trained += rows.tolist()
        assert sorted(trained + ranks[0].trimmed.tolist()) == np.flatnonzero(index >= 0).tolist()
        assert len(ranks[0].trimmed) < batch_size * world_size
        np.testing.assert_array_equal(ranks[0].trimmed, ranks[-1].trimmed)


def test_ids_decide_the_permutation_and_rows_come_back() -> None:
    index = np.zeros(12, dtype=int)
    ids = np.arange(12)[::-1] * 7
    rows = [b.rows.tolist() for b in NovelAIEpochs(index, 4, ids=ids).epoch()]
    texts = [b.rows.tolist() for b in NovelAIEpochs(index, 4, ids=[f"{i:03}" for i in ids]).epoch()]
    assert rows == texts
    assert sorted(chain(*rows)) == list(range(12))


def test_too_few_images_say_so() -> None:
    epochs = NovelAIEpochs([0, 0, 1], batch_size=4)
    assert list(epochs.epoch()) == []
    with pytest.raises(PlanError, match="3 images do not fill one batch of 4"):
        epochs.next_batch()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch size 0"),
        ({"rank": 1}, "rank 1"),
        ({"ids": [1, 1, 2]}, "id 1 occurs twice|id np.int64\\(1\\) occurs twice"),
        ({"ids": [1]}, "1 ids for 3 images"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, message) -> None:
    with pytest.raises(PlanError, match=message):
        NovelAIEpochs([0, 0, 1], **options)


def test_a_new_number_of_ranks_starts_anew() -> None:
    epochs = NovelAIEpochs(np.zeros(24, dtype=int), 4)
    assert epochs.batch_total == 6
    epochs.start_epoch(world_size=2, rank=1)
    assert len(list(epochs.epoch())) == epochs.batch_total == 3
