"""What must be equal in a batch besides the size, where nearly every bucket has its own: control images of any size."""

import numpy as np

from kohya_bucket.trainers.door.placed import ItemsInBuckets


class Side(int):
    compared = 0

    def __eq__(self, other):
        Side.compared += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


def test_groups_are_found_without_comparing_each_with_each():
    keys = [(512, 64 + i, 1, (Side(i // 2), Side(8))) for i in range(400)]
    ids = np.arange(len(keys), dtype=np.int32)
    items = ItemsInBuckets([str(i) for i in ids], np.ones(len(keys), dtype=np.int64), ids, keys, [1] * 400, 1, None)
    assert items.group_of_bucket.tolist() == [i // 2 * 2 for i in range(400)]
    assert Side.compared < 10 * len(keys)
