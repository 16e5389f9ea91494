"""Storage that does not answer is no fault of an image that lies there: the run ends, and leaves none out."""

import numpy as np
import pytest
import torch

from kohya_bucket.errors import StorageError
from kohya_bucket.trainers.door.batches import PlannedBatch, batch_of_the_readable
from kohya_bucket.trainers.door.ranks import exit_with_message


class Images:
    keys = ("a", "b", "c", "d")
    pairs = (np.arange(4), np.zeros(4, dtype=np.int64))


@pytest.mark.parametrize("later", [False, True], ids=["at once", "while others are tried"])
def test_an_error_of_the_storage_ends_the_run(later, caplog):
    asked = []

    def make(batch):
        asked.append(batch.images.tolist())
        raise OSError("cut off") if later and asked[-1] != [1] else StorageError("s3://bucket does not answer")

    batch = PlannedBatch(0, 0, 0, np.array([0, 1], dtype=np.int32), 7, 0)
    with pytest.raises(StorageError, match="does not answer"):
        batch_of_the_readable(make, batch, Images(), "leave_out")
    assert asked == [[0, 1], *([[0], [1]] if later else [])]
    assert caplog.text == ""


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        with exit_with_message():
            raise StorageError("s3://bucket does not answer")


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_worker_has_to_say_reaches_the_trainer(workers):
    loader = torch.utils.data.DataLoader(Broken(), num_workers=workers)
    with pytest.raises(StorageError if workers else SystemExit, match="s3://bucket does not answer") as ended:
        next(iter(loader))
    assert getattr(ended.value, "code", None) == (None if workers else 2)
