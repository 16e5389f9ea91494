"""Storage that does not answer is no fault of an image that lies there: the run ends, and leaves none out."""

import errno
import os

import numpy as np
import pytest
import torch

from kohya_bucket.errors import StorageError, UnreadableError
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


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_folder_that_is_away_ends_the_run(tmp_path, wrapped, caplog):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "another.png").touch()

    def make(batch):
        for number in batch.images.tolist():
            folder = "here" if number == 2 else "gone" if number < 2 else ""
            error = FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / folder / f"{number}.png"))
            if wrapped and folder:
                raise RuntimeError("not loaded") from error
            if folder:
                raise error
        return batch.images.tolist()

    images = Images()
    with pytest.raises(UnreadableError, match=r"gone is gone, or empty: \d\.png cannot be read"):
        batch_of_the_readable(make, PlannedBatch(0, 0, 0, np.array([0, 3], np.int32), 7, 0), images, "leave_out")
    assert caplog.text == ""
    # one file that is gone alone
    batch = PlannedBatch(0, 0, 0, np.array([2, 3], np.int32), 7, 0)
    (tmp_path / "gone").mkdir()
    for number in (0, 1):
        (tmp_path / "gone" / f"{number}.PNG").touch()
    assert batch_of_the_readable(make, batch, images, "leave_out") == [3]


def test_a_broken_image_beside_which_another_file_was_looked_for_is_left_out(tmp_path):
    images = Images()
    images.keys = [str(tmp_path / f"{number}.png") for number in range(4)]
    for path in images.keys:
        open(path, "wb").close()

    def make(batch):
        for number in set(batch.images.tolist()) & {1, 2}:
            try:
                raise FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / f"{number}.npz"))
            except FileNotFoundError:
                raise ValueError("broken")  # noqa: B904 (as a trainer may)
        return batch.images.tolist()

    batch = PlannedBatch(0, 0, 0, np.array([0, 1], np.int32), 7, 0)
    assert batch_of_the_readable(make, batch, images, "leave_out") == [0, 3]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_fault_of_the_disk_that_may_pass_ends_the_run(code):
    def make(batch):
        raise OSError(code, os.strerror(code), "a.png")

    batch = PlannedBatch(0, 0, 0, np.array([0, 1], np.int32), 7, 0)
    with pytest.raises(UnreadableError, match=r"a\.png: cannot be read now"):
        batch_of_the_readable(make, batch, Images(), "leave_out")


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
