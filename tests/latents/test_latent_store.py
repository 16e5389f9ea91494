"""What was committed is what is read, whatever was done to the files meanwhile."""

import os
import pickle
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.dtypes import from_float32
from kohya_bucket.latents.maintenance import pack, verify
from kohya_bucket.latents.store.entries import ItemTable, decode, encode, narrowed, schema
from kohya_bucket.latents.store.exact_arrays import pack as packed
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from tests.latents.latent_helpers import SPACE, bits, entry, fill, same

items = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
    st.tuples(
        st.sampled_from(["float32", "float16", "bfloat16"]),
        st.sampled_from(["latents", "posterior"]),
        st.booleans(),
        st.sampled_from(["none", "opaque", "mask"]),
        st.sampled_from([(64, 32), (32, 64), (48, 48)]),
        st.integers(0, 2**31),
    ),
    max_size=12,
)


@pytest.mark.long
@given(items, st.sampled_from([1, 2000, 1 << 30]), st.booleans())
def test_everything_written_is_read_back(tmp_path_factory, chosen, shard_bytes, with_manifest):
    root = tmp_path_factory.mktemp("store")
    masks = {}
    with StoreWriter(root, shard_bytes=shard_bytes) as writer:
        for name, (dtype, kind, flip, mask, bucket, seed) in chosen.items():
            made = entry(name, dtype=dtype, kind=kind, flip=flip, mask=mask != "none", bucket_size=bucket)
            if mask == "mask":
                masks[name] = np.random.default_rng(seed).integers(0, 256, bucket[::-1], dtype=np.uint8)
            writer.add(
                made,
                bits(seed, dtype, kind, bucket),
                flipped=bits(seed + 1, dtype, kind, bucket) if flip else None,
                mask=masks.get(name),
                space=SPACE,
            )
    store = LatentStore(root)
    if with_manifest:
        write_manifest(store)
        store = LatentStore(root)
        assert store.indexed
    assert store.damage == []
    assert store.strings("source") == sorted(chosen, key=lambda s: s.encode())
    at = store.find(list(chosen))
    for i, (name, (dtype, kind, flip, mask, bucket, seed)) in zip(at, chosen.items(), strict=True):
        made = entry(name, dtype=dtype, kind=kind, flip=flip, mask=mask != "none", bucket_size=bucket)
        assert store.entry(i) == made
        assert store.info(i).space == SPACE
        assert same(store.read(i), bits(seed, dtype, kind, bucket))
        if flip:
            assert same(store.read(i, flipped=True), bits(seed + 1, dtype, kind, bucket))
        else:
            with pytest.raises(LatentStoreError, match="--flip"):
                store.read(i, flipped=True)
        if mask == "none":
            with pytest.raises(LatentStoreError, match="--mask"):
                store.read_mask(i)
        else:
            got = store.read_mask(i)
            assert got is None if mask == "opaque" else same(got, masks[name])
        assert store.check(i) is None
    assert list(store.find(["never written"])) == [-1]


def test_collections_are_separate(tmp_path):
    with StoreWriter(tmp_path) as writer:
        for k, name in enumerate(["", "sdxl"]):
            made = entry("a")
            writer.add(type(made)(**(vars(made) | {"collection": name})), bits(k), space=SPACE)
    store = LatentStore(tmp_path)
    assert len(store) == 2
    assert same(store.read(store.find(["a"], "sdxl")[0]), bits(1))
    assert list(store.find(["a"], "flux")) == [-1]


@pytest.mark.parametrize("name", [None, 5, "a\0b", "\udcff"])
def test_a_name_of_a_collection_that_rows_cannot_hold_is_refused_before_anything_is_written(tmp_path, name):
    with StoreWriter(tmp_path) as writer:
        with pytest.raises(LatentStoreError, match="collection is"):
            writer.add(replace(entry("a"), collection=name), bits(1), space=SPACE)
        with pytest.raises(LatentStoreError, match="collection is"):
            writer.add_text(replace(entry("a"), collection=name), {"x": packed(np.zeros(3, np.float32))})
        writer.add(entry("a"), bits(1), space=SPACE)
    store = LatentStore(tmp_path)
    assert (len(store), store.damage, len(store.in_collection(name))) == (1, [], 0)


def test_reading_copies_nothing_and_cannot_change_the_file(tmp_path):
    want = fill(tmp_path, ["a", "b"])
    store = LatentStore(tmp_path)
    row = store.read(0)
    assert not row.flags.owndata
    row[:] = 0
    assert same(LatentStore(tmp_path).read(0), want["a"])


def test_gather_is_the_items_in_the_order_asked(tmp_path):
    names = [f"{i:02d}" for i in range(10)]
    want = fill(tmp_path, names, shard_bytes=600, flip=True)
    store = LatentStore(tmp_path)
    assert len(store.shards) > 2
    order = [7, 0, 3, 3]
    assert same(store.gather(order), np.stack([want[names[i]] for i in order]))
    mixed = store.gather(order, flipped=[False, True, False, True])
    assert same(mixed[1], store.read(0, flipped=True))
    assert same(mixed[2], want["03"])


def test_damage_is_reported_with_the_item_and_the_remedy(tmp_path):
    fill(tmp_path, ["a"])
    (shard,) = Layout(tmp_path).shards.iterdir()
    data = bytearray(shard.read_bytes())
    data[LatentStore(tmp_path).info(0).tensors["latents"].offset] ^= 1
    shard.write_bytes(data)
    store = LatentStore(tmp_path)
    with pytest.raises(
        LatentStoreError, match=r"a in shard .* is damaged \(checksum of latents.* cache prune .* --damaged"
    ):
        store.read(0)
    assert "checksum" in store.check(0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["latents", "posterior"])
def test_what_is_not_finite_is_damage(tmp_path, dtype, kind):
    for n, value in enumerate((np.nan, -np.nan, np.inf, -np.inf)):
        root = tmp_path / str(n)
        made = entry("a", dtype=dtype, kind=kind)
        plain = bits(0, dtype, kind)
        plain.flat[-1] = from_float32(np.array([value], np.float32), dtype)[0]
        with StoreWriter(root) as writer:
            writer.add(made, plain, space=SPACE)
            writer.add(entry("b", dtype=dtype, kind=kind), bits(1, dtype, kind), space=SPACE)
        store = LatentStore(root)
        with pytest.raises(
            LatentStoreError, match=rf"a in shard .*its {kind} is not finite.* cache prune .* --damaged"
        ):
            store.read(0)
        assert same(store.read(1), bits(1, dtype, kind))
        assert [i for i, _ in verify(store)] == [0]
        assert LatentStore(root, verify="never").read(0) is not None


def test_a_batch_of_two_shapes_is_refused(tmp_path):
    fill(tmp_path, ["a"])
    fill(tmp_path, ["b"], bucket_size=(32, 64))
    with pytest.raises(LatentStoreError, match="different shapes"):
        LatentStore(tmp_path).gather([0, 1])


def test_two_writers_at_once_lose_nothing(tmp_path):
    one, two = StoreWriter(tmp_path, shard_bytes=600), StoreWriter(tmp_path, shard_bytes=600)
    for k in range(20):
        (one if k % 2 else two).add(entry(f"{k:02d}"), bits(k), space=SPACE)
        if k == 11:
            write_manifest(LatentStore(tmp_path))
    one.flush()
    two.flush()
    store = LatentStore(tmp_path)
    assert len(store) == 20
    assert all(same(store.read(k), bits(k)) for k in range(20))


def test_pickled_for_a_worker_it_reads_the_same(tmp_path):
    want = fill(tmp_path, ["a", "b"])
    store = LatentStore(tmp_path)
    store.read(0)
    assert same(pickle.loads(pickle.dumps(store)).read(1), want["b"])


@pytest.mark.weekly
def test_any_flipped_byte_of_a_shard_is_noticed(tmp_path):
    """Over every region of the file: length, header, latents, description of the rows."""
    want = fill(tmp_path, ["a", "b", "c"], flip=True)
    (shard,) = Layout(tmp_path).shards.iterdir()
    good = shard.read_bytes()
    random = np.random.default_rng(0)
    regions = [*range(8), *random.integers(8, 500, 30), *random.integers(500, len(good), 60)]
    unharmed, store = 0, LatentStore(tmp_path)
    for at in regions:
        store.release()
        shard.write_bytes(good[:at] + bytes([good[at] ^ (1 << random.integers(8))]) + good[at + 1 :])
        store = LatentStore(tmp_path)
        if store.damage:
            continue
        bad = 0
        for i, name in enumerate(store.strings("source")):
            for flipped in (False, True):
                try:
                    got = store.read(i, flipped=flipped)
                except LatentStoreError:
                    bad += 1
                    continue
                if not flipped:
                    assert same(got, want[name])
                del got
            assert store.entry(i) == entry(name, flip=True)
        unharmed += bad == 0
        assert bad <= 1
    assert unharmed <= 6  # padding, and names in the metadata that nothing reads


def test_any_truncation_of_a_shard_is_noticed(tmp_path):
    fill(tmp_path, ["a"], shard_bytes=1)
    want = fill(tmp_path, ["b"])
    indexed = LatentStore(tmp_path)
    victim = Layout(tmp_path).shards / indexed.info(0).name
    good = victim.read_bytes()
    for with_manifest in (False, True):
        if with_manifest:
            victim.write_bytes(good)
            write_manifest(LatentStore(tmp_path))
        for length in [0, 5, 8, 100, 700, len(good) // 2, len(good) - 1]:
            victim.write_bytes(good[:length])
            store = LatentStore(tmp_path)
            assert store.strings("source") == ["b"]
            assert same(store.read(0), want["b"])
            assert [name for name, _ in store.damage] == [victim.name]
    with pytest.raises(LatentStoreError, match="truncated"):
        indexed.read(0)


def test_a_damaged_or_lost_manifest_costs_no_item(tmp_path):
    want = fill(tmp_path, ["a", "b"])
    path = write_manifest(LatentStore(tmp_path))
    good = path.read_bytes()
    for content in [b"", good[:100], good[:50] + b"x" + good[51:]]:
        path.write_bytes(content)
        store = LatentStore(tmp_path)
        assert store.strings("source") == ["a", "b"]
        assert store.damage[0][0] == path.name
        assert same(store.read(1), want["b"])
    for path in Layout(tmp_path).manifests():
        path.unlink()
    assert len(LatentStore(tmp_path)) == 2


numbers = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300) | st.integers(-70_000, 70_000), min_size=1)
columns = st.one_of(
    st.tuples(st.just("int64"), numbers),
    st.tuples(st.just("uint32"), st.lists(st.integers(0, 2**32 - 1) | st.just(0))),
    st.tuples(st.just("float64"), st.lists(st.floats(allow_nan=False) | st.floats(width=32, allow_nan=False))),
    st.tuples(st.just("large_string"), st.lists(st.none() | st.text(max_size=3))),
)


@given(column=columns)
def test_a_column_in_the_smallest_type_has_the_same_values(column):
    kind, values = column
    made = pa.array(values, kind)
    small = narrowed(made)
    assert (small.cast(kind).equals(made), small.nbytes <= made.nbytes) == (True, True)
    if kind != "float64" and values and max(map(abs, (v for v in values if isinstance(v, int))), default=200) < 128:
        assert small.type == "int8"


def test_a_store_without_a_manifest_has_the_same_rows_and_writes_them_in_the_types_of_files(tmp_path):
    fill(tmp_path, "cab", shard_bytes=1)
    listed = LatentStore(tmp_path)
    for path in listed.layout.manifests():
        path.unlink()
    rows = LatentStore(tmp_path).table
    assert (rows.to_pylist(), rows.schema == schema()) == (listed.table.to_pylist(), False)
    written, _ = decode(encode(rows, {}))
    assert (written.to_pylist(), written.schema) == (listed.table.to_pylist(), schema())


def test_a_damaged_manifest_costs_no_newer_caption_and_whoever_opens_the_store_says_it(tmp_path, caplog):
    fill(tmp_path, ["a"])
    store = LatentStore(tmp_path)
    path = write_manifest(store, store.with_texts(caption={0: "newer"}))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    store = LatentStore(tmp_path)
    assert store.strings("caption") == ["newer"]
    (said,) = caplog.messages
    assert f"{path.name} is damaged" in said
    assert write_manifest(store) is not None
    assert LatentStore(tmp_path).strings("caption") == ["newer"]
    assert len(caplog.messages) == 1


def test_a_manifest_of_shards_that_are_gone_has_only_what_is_there_and_the_rest_is_named(tmp_path, caplog):
    fill(tmp_path, ["a"])
    fill(tmp_path, ["b"])
    write_manifest(LatentStore(tmp_path))
    store = LatentStore(tmp_path)
    (Layout(tmp_path).shards / store.info(0).name).unlink()
    assert LatentStore(tmp_path).strings("source") == ["b"]
    (said,) = caplog.messages
    assert f"{store.info(0).name}: gone; 1 item is lost: a" in said
    with pytest.raises(LatentStoreError, match="packed or pruned"):
        store.read(0)


def test_a_manifest_is_searched_once_however_many_shards_are_gone(tmp_path, monkeypatch):
    for name in "abcdef":
        fill(tmp_path, [name])
    write_manifest(LatentStore(tmp_path))
    searched = []
    monkeypatch.setattr(
        ItemTable, "find", lambda self, *args, find=ItemTable.find: searched.append(1) or find(self, *args)
    )
    for path in sorted((tmp_path / "shards").iterdir())[:5]:
        path.unlink()
    store = LatentStore(tmp_path)
    assert len(store.damage) == len(store.away) == store.away_rows.num_rows == 5
    assert len(searched) == 1


def test_manifests_replace_each_other(tmp_path):
    fill(tmp_path, ["a"])
    assert write_manifest(LatentStore(tmp_path)) is not None
    assert write_manifest(LatentStore(tmp_path)) is None
    fill(tmp_path, ["b"])
    assert write_manifest(LatentStore(tmp_path)) is not None
    assert len(Layout(tmp_path).manifests()) == 2


def test_safetensors_opens_a_shard(tmp_path):
    import safetensors.numpy as safetensors

    want = fill(tmp_path, ["a", "b"], dtype="float32")
    (shard,) = Layout(tmp_path).shards.iterdir()
    got = safetensors.load_file(shard)
    assert set(got) == {"latents", "entries"}
    assert same(got["latents"].view(np.uint32), np.stack([want["a"], want["b"]]).view(np.uint32))


def test_no_store_is_said(tmp_path):
    with pytest.raises(LatentStoreError, match="not a latent store"):
        LatentStore(tmp_path / "nothing")
    with pytest.raises(LatentStoreError, match="verify"):
        LatentStore(tmp_path, verify="sometimes")


def between(monkeypatch, name, *, before=None, after=None):
    """Let another process come in around the first call of a method of `Layout`."""
    real = getattr(Layout, name)

    def once(*args):
        monkeypatch.setattr(Layout, name, real)
        if before is not None:
            before()
        out = real(*args)
        if after is not None:
            after()
        return out

    monkeypatch.setattr(Layout, name, once)


@pytest.mark.long
@pytest.mark.parametrize(("name", "indexed"), [("shard_sizes", False), ("manifests", False), ("manifests", True)])
def test_a_store_that_is_packed_while_it_is_opened_has_all_items(tmp_path, monkeypatch, name, indexed):
    want = {}
    for k in range(4):
        want |= fill(tmp_path, [f"{k}a", f"{k}b"])
    if indexed:
        write_manifest(LatentStore(tmp_path))
    between(monkeypatch, name, after=lambda: pack(LatentStore(tmp_path)))
    store = LatentStore(tmp_path)
    assert store.strings("source") == sorted(want)
    assert all(same(store.read(i), want[name]) for i, name in enumerate(sorted(want)))
    assert store.damage == []


def test_a_store_that_is_packed_between_its_listing_and_the_look_at_each_file_has_all_items(tmp_path, monkeypatch):
    want = fill(tmp_path, ["a", "b"]) | fill(tmp_path, ["c"])
    real, packed = os.scandir, []

    @contextmanager
    def listed(folder):
        with real(folder) as found:
            entries = list(found)
        if not packed and Path(folder).name == "shards":
            packed.append(True)
            pack(LatentStore(tmp_path))
        yield entries

    monkeypatch.setattr(os, "scandir", listed)
    store = LatentStore(tmp_path)
    assert packed
    assert store.strings("source") == sorted(want)


def test_captions_are_those_of_a_manifest_that_came_meanwhile(tmp_path, monkeypatch):
    fill(tmp_path, ["a", "b"])

    def other_captions(text):
        store = LatentStore(tmp_path)
        write_manifest(store, store.with_texts(caption={0: text}))

    other_captions("old")
    between(monkeypatch, "read_manifest", before=lambda: other_captions("new"))
    assert LatentStore(tmp_path).strings("caption") == ["new", "caption of b"]


def test_a_shard_that_goes_while_others_are_listed_takes_none_with_it(tmp_path):
    fill(tmp_path, ["a", "b"])
    try:
        (Layout(tmp_path).shards / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    except OSError:
        pytest.skip("no links here, which stand in for a file that was listed and is gone")
    assert LatentStore(tmp_path).strings("source") == ["a", "b"]


AHEAD = 10 * 365 * 24 * 3600 * 10**9


def test_a_clock_that_runs_ahead_makes_nothing_newest_for_ever(tmp_path, monkeypatch):
    """Neither rows nor an index of it: a store counts by itself who came later."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + AHEAD)
    fill(tmp_path, ["a", "b"])
    store = LatentStore(tmp_path)
    ahead = write_manifest(store, store.with_texts(caption={0: "of the clock that runs ahead"}))
    kept = ahead.read_bytes()
    monkeypatch.setattr(time, "time_ns", real)
    newer = fill(tmp_path, ["a"], dtype="float32")
    write_manifest(LatentStore(tmp_path))
    ahead.write_bytes(kept)  # as where it could not be removed
    store = LatentStore(tmp_path)
    assert store.strings("source") == ["a", "b"]
    assert store.info(0).latents.dtype == "float32"
    assert same(store.read(0), newer["a"])
    assert store.indexed


def test_of_writers_that_are_open_at_once_who_commits_later_counts(tmp_path):
    one, two = StoreWriter(tmp_path), StoreWriter(tmp_path)
    for n in range(3):
        for writer, seed in ((one, 2 * n), (two, 2 * n + 1)):
            for _ in range(n):  # the other's numbers run ahead
                writer.add(entry("other"), bits(99), space=SPACE)
            writer.add(entry("a"), bits(seed), space=SPACE)
            writer.flush()
            store = LatentStore(tmp_path)
            assert same(store.read(store.find(["a"])[0]), bits(seed))


def test_of_one_writers_items_the_last_counts_whatever_its_kind(tmp_path):
    with StoreWriter(tmp_path) as writer:
        writer.add(entry("b"), bits(0), space=SPACE)
        writer.add(entry("a", dtype="float32"), bits(1, "float32"), space=SPACE)
        writer.add(entry("a"), bits(2), space=SPACE)  # goes to disk with "b", before the one it replaces
    assert same(LatentStore(tmp_path).read(0), bits(2))


def test_rows_that_hold_a_time_are_replaced_by_rows_that_hold_a_count(tmp_path):
    """Stores written before: their numbers are nanoseconds, which no count would reach by itself."""
    with StoreWriter(tmp_path) as writer:
        writer.add(entry("a"), bits(0), space=SPACE, sequence=time.time_ns() + AHEAD)
    fill(tmp_path, ["a"], dtype="float32")
    assert LatentStore(tmp_path).info(0).latents.dtype == "float32"


@pytest.mark.parametrize("indexed", [False, True])
def test_of_two_rows_of_one_number_every_reader_takes_the_same(tmp_path, indexed):
    for seed in range(4):  # as of writers on several machines that did not see each other's files
        with StoreWriter(tmp_path) as writer:
            writer.add(entry("a"), bits(seed), space=SPACE, sequence=7)
    if indexed:
        write_manifest(LatentStore(tmp_path))
    last = max(path.name for path in Layout(tmp_path).shards.iterdir())
    assert LatentStore(tmp_path).info(0).name == last
    fill(tmp_path, ["a"], dtype="float32")
    assert LatentStore(tmp_path).info(0).latents.dtype == "float32"


READ_ALL = """
import resource, sys
from kohya_bucket.latents import LatentStore
stores = [LatentStore(root) for root in sys.argv[1:]]
resource.setrlimit(resource.RLIMIT_NOFILE, (90, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print([sum(store.read(i).nbytes > 0 for store in stores for i in range(len(store))) for _ in range(2)])
"""


@pytest.mark.weekly
@pytest.mark.posix("Windows has no limit of open files")
def test_many_shards_are_read_with_few_open_files(tmp_path):
    for name in ("a", "b"):
        fill(tmp_path / name, [f"{i}.png" for i in range(60)], shard_bytes=1)
        assert len(LatentStore(tmp_path / name).shards) == 60
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path / "a"), str(tmp_path / "b")], capture_output=True, text=True
    )  # fmt: skip
    assert done.stdout == "[120, 120]\n", done.stderr
