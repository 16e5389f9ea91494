"""The launcher opens a door for each trainer that it knows; only one of them is imported."""

import pytest
import torch.utils.data as loading

from kohya_bucket.trainers.door.door import _doors, guard, guard_no_longer


class Toy:
    """A door of a trainer that is not what it was, whose datasets are of one class."""

    def __init__(self, kind):
        self.kind = kind

    def is_group(self, dataset):
        return isinstance(dataset, self.kind)

    def planned(self, signature, args, kwargs):
        raise AssertionError("nothing is planned for a trainer that is not known")

    def why_inactive(self):
        return f"{self.kind.__name__}s are not known"

    def end(self, why):
        raise SystemExit(why)

    def look_at(self, group):
        raise AssertionError("no group was made")


class First(list):
    pass


class Second(list):
    pass


@pytest.fixture
def doors():
    assert not _doors
    doors = [Toy(First), Toy(Second)]
    for door in doors:
        guard(door)
        guard(door)
    yield doors
    for door in doors:
        guard_no_longer(door)


def test_each_door_speaks_of_its_own_data_sets(doors):
    for door in doors:
        with pytest.raises(SystemExit, match=f"^{door.kind.__name__}s are not known"):
            loading.DataLoader(door.kind([1]))
    assert list(loading.DataLoader([1], collate_fn=list)) == [[1]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_door_that_is_closed_leaves_the_other_open_and_itself_out(order):
    untouched, doors = loading.DataLoader.__init__, [Toy(First), Toy(Second)]
    for door in doors:
        guard(door)
    closed, still = doors[order[0]], doors[order[1]]
    try:
        guard_no_longer(closed)
        with pytest.raises(SystemExit):
            loading.DataLoader(still.kind([1]))
        loading.DataLoader(closed.kind([1]))
    finally:
        guard_no_longer(still)
        guard_no_longer(closed)
    assert loading.DataLoader.__init__ is untouched
