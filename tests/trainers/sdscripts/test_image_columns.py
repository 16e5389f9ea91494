"""Image records as columns give back what was put in, and keep what is written to them."""

import pickle
import tracemalloc

import numpy as np
import pytest

from kohya_bucket.images.text_column import TextColumn
from kohya_bucket.trainers.door.batches import ImageKey
from kohya_bucket.trainers.sdscripts.tables import ImageColumns


class Info:
    """Any attributes: what sd-scripts' own records hold is tested in `compat_tests/`."""

    def __init__(self, key, **attributes):
        self.image_key = key
        self.__dict__.update(attributes)


def columns(infos):
    return ImageColumns(TextColumn.from_texts([info.image_key for info in infos]), infos)


def same(left, right):
    return type(left) is type(right) and left == right


VALUES = {
    "a constant": lambda _: None,
    "true and one": lambda i: [True, 1, 1.0, 0.0, -0.0, None, "1", ""][i % 8],
    "many texts": lambda i: f"caption {i} é\udcff",
    "the key": lambda i: f"/images/ä {i}.png",
    "sizes": lambda i: (i, 2 * i),
    "sizes in lists": lambda i: [i, 2 * i],
    "large numbers": lambda i: (i << 40, -i),
    "numbers beyond 64 bits": lambda i: (i << 70, i),
    "fractions": lambda i: (i / 7, 0.0, -0.0, i / 3),
    "mixed numbers": lambda i: (i, i / 2),
    "lengths that differ": lambda i: (0,) * (i % 300),
    "texts and none": lambda i: f"{i}.npz" if i % 3 else None,
    "lists of texts": lambda i: ["a", f"{i}"],
    "few pairs": lambda i: (64 * (i % 5), 64),
    "true in a pair": lambda i: (True, i),
}


@pytest.mark.long
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("n", [1, 1000])
def test_every_attribute_comes_back_equal_and_of_its_type(value, n) -> None:
    infos = [Info(f"/images/ä {i}.png", value=value(i)) for i in range(n)]
    records = columns(infos)
    assert list(records) == [info.image_key for info in infos]
    for info, record in zip(infos, records.values(), strict=True):
        assert vars(record) == vars(info)
        assert type(record.value) is type(info.value)
        assert repr(record.value) == repr(info.value)  # tells 0.0 from -0.0 and (1, 2) from (1.0, True)
        assert isinstance(record, Info)
        assert type(record).__name__ == "Info"


def test_objects_stay_the_same_objects() -> None:
    arrays = [np.arange(i) for i in range(300)]
    records = columns([Info(str(i), latents=array) for i, array in enumerate(arrays)])
    assert all(records[str(i)].latents is array for i, array in enumerate(arrays))


def test_what_is_written_is_kept() -> None:
    records = columns([Info(str(i), latents=None, size=(i, i)) for i in range(5)])
    assert not records.changed
    records["3"].latents = "there"
    for record in records.values():
        record.size = (0, *record.size)
    assert records["3"].latents == "there"
    assert records["2"].size == (0, 2, 2)
    assert records.changed
    again = columns(list(records.values()))
    assert not again.changed
    assert again["3"].latents == "there"


def test_it_is_a_mapping_like_the_dict_it_replaces() -> None:
    records = columns([Info(str(i)) for i in range(5)])
    assert "4" in records
    assert "5" not in records
    assert len(records) == 5
    del records["1"]
    records["new"] = Info("new")
    assert list(records) == ["0", "2", "3", "4", "new"]
    assert len(records) == 5
    with pytest.raises(KeyError, match="1"):
        records["1"]
    with pytest.raises(KeyError, match="7"):
        del records["7"]
    records["1"] = Info("1", back=True)
    assert records["1"].back
    assert set(records) == {"0", "1", "2", "3", "4", "new"}
    assert dict(records)["new"].image_key == "new"
    del records["new"]
    assert "new" not in records


def test_a_key_that_knows_its_row_is_not_believed_by_another_table() -> None:
    key = ImageKey("b")
    key.row = 1
    assert columns([Info("a"), Info("b", mine=1)])[key].mine == 1
    assert columns([Info("b", mine=2), Info("c")])[key].mine == 2
    with pytest.raises(KeyError):
        columns([Info("a"), Info("c")])[key]
    assert type(pickle.loads(pickle.dumps(key))) is str


def test_a_spawned_worker_gets_columns_and_plain_records() -> None:
    records = columns([Info(str(i), size=(i, 1)) for i in range(1000)])
    records["7"].size = (7, 7)
    sent = pickle.loads(pickle.dumps(records))
    assert [vars(a) for a in sent.values()] == [vars(a) for a in records.values()]
    assert type(sent["7"]) is Info
    assert len(pickle.dumps(records)) < len(pickle.dumps({k: Info(k, size=v.size) for k, v in records.items()})) / 2


@pytest.mark.slow
def test_many_records_take_a_fraction_of_their_objects() -> None:
    def infos():
        return [
            Info(f"/data/photos/image_{i:07d}.jpg", caption=f"a photograph, number {i}", size=(i, i + 1), reg=False)
            for i in range(20_000)
        ]

    tracemalloc.start()
    objects = infos()
    held = tracemalloc.get_traced_memory()[0]
    records = columns(objects)
    del objects
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(records) == 20_000
    assert kept < held / 4
