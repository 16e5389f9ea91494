"""Outputs of text encoders: what was given is what is read, to the last bit, in as few bytes as the numbers allow."""

import json
import os
import pickle
import random
import shutil
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.fingerprint import Stale, why_stale
from kohya_bucket.latents.items import Caption, Encoding
from kohya_bucket.latents.maintenance import pack as pack_store
from kohya_bucket.latents.maintenance import prune, status, verify, verify_files
from kohya_bucket.latents.store.entries import arrow, check_rows
from kohya_bucket.latents.store.exact_arrays import pack, unpack
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.shards import ShardInfo, read_header
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from tests.latents.latent_helpers import SPACE, bits, entry, fill, same
from tests.latents.text_outputs import fill_texts, made_outputs, same_outputs, write_until_killed
from tests.thinned import weekly
from tests.warm import QUICK

TYPES = ["<f2", "<f4", "<f8", "|b1", "|u1", "|i1", "<u2", "<i2", "<i4", "<u4", "<i8"]
arrays = st.sampled_from(TYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


def bf16(values):
    bits = np.atleast_1d(values).astype(np.float32).view(np.uint32) & 0xFFFF0000  # numpy 1 has no views without axes
    return bits.view(np.float32).reshape(np.shape(values))


@given(arrays, st.integers(0, 6), st.booleans())
def test_any_array_comes_back_to_the_last_bit(array, repeats, halves):
    if halves and array.dtype == np.float32:
        array = bf16(array)
    if array.ndim and len(array):
        array = np.concatenate([array, np.repeat(array[-1:], repeats, axis=0)])
    packed = pack(array)
    same_outputs({"a": unpack(packed)}, {"a": array})
    if array.ndim and len(array) and repeats and array.size:
        assert len(packed.bits) < len(array)
    if halves and array.dtype == np.float32 and array.size:
        assert packed.bits.itemsize == 2


def test_every_half_is_widened_to_its_own_bits():
    halves = np.arange(2**16, dtype=np.uint32).reshape(256, 256) << 16
    halves.flags.writeable = False
    packed = pack(halves.view(np.float32))
    packed.bits.flags.writeable = False  # as in a mapped shard
    assert packed.storage == "bfloat16"
    assert np.array_equal(unpack(packed).view(np.uint32), halves)


def test_outputs_that_are_not_finite_are_refused(tmp_path):
    for value in (np.nan, np.inf, -np.inf):
        outputs = {"states": pack(np.array([[1, value]], np.float32)), "ids": pack(np.arange(3))}
        with StoreWriter(tmp_path) as writer, pytest.raises(LatentStoreError, match=r"'a cat'.*not finite"):
            writer.add_text(Caption("a cat").entry("", Encoding()), outputs)
    with StoreWriter(tmp_path) as writer:
        writer.add_text(Caption("a cat").entry("", Encoding()), {"states": pack(np.ones(2))})


def test_negative_zeros_and_nan_payloads_are_bits_like_others():
    values = np.array([[1, 2], [-0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], np.float32)
    assert len(pack(values).bits) == 3
    odd = np.array([0x7FC00000, 0x7F800001, 0xFFC10000, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    for array in (values, values[:2], odd, odd[:, None].repeat(3, 1), odd.astype(np.float16)):
        same_outputs({"a": unpack(pack(array))}, {"a": array})


def test_what_is_stored_is_what_the_encoder_gave():
    rng = np.random.default_rng(0)
    t5 = bf16(rng.standard_normal((512, 64)))
    t5[77:] = 0
    assert (pack(t5).storage, pack(t5).bits.shape) == ("bfloat16", (78, 64))
    t5[77:] = t5[76]
    assert pack(t5).bits.shape == (77, 64)
    half = rng.standard_normal((9, 4)).astype(np.float16)
    assert pack(half).storage == pack(half.astype(np.float32)).storage == "float16"
    assert pack(rng.standard_normal((9, 4)).astype(np.float32)).storage == "float32"
    assert pack(np.ones(512, np.int64)).bits.nbytes == 1
    assert pack(np.arange(512)).storage == "int32"
    assert pack(np.array(2**40)).storage == "int64"
    for wrong in (np.array("text"), np.array([1j]), np.array([2**63 + 1], np.uint64), np.array([None])):
        with pytest.raises(LatentStoreError, match="cannot be stored"):
            pack(wrong)


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=10), st.sampled_from([1, 3000, 1 << 30]))
def test_everything_written_is_read_back(tmp_path_factory, chosen, shard_bytes):
    root = tmp_path_factory.mktemp("store")
    want = {}
    with StoreWriter(root, shard_bytes=shard_bytes) as writer:
        for number, seed in chosen:
            caption = Caption(f"caption {number}")
            want[caption.key] = made_outputs(number, seed)
            writer.add_text(
                caption.entry("flux", Encoding("e", "t")), {k: pack(v) for k, v in want[caption.key].items()}
            )
    for opened in (LatentStore(root), LatentStore(root, verify="always")):
        write_manifest(opened)
        opened = pickle.loads(pickle.dumps(LatentStore(root)))
        assert (opened.indexed, opened.damage, verify(opened)) == (True, [], [])
        assert opened.strings("source") == sorted(want)
        for i, key in enumerate(opened.strings("source")):
            same_outputs(opened.arrays(i), want[key])
            assert opened.entry(i).fingerprint.vae == "e"
            assert opened.entry(i).caption.startswith("caption ")


def test_a_shard_is_a_file_of_safetensors_with_an_array_of_all_captions_in_each_tensor(tmp_path):
    import safetensors

    want = fill_texts(tmp_path, 3)
    shard = next((tmp_path / "shards").glob("*.safetensors"))
    specs, _, metadata = read_header(shard)
    assert next(iter(specs)) == "spans"
    assert specs["spans"].shape == (3, 4, 3)
    assert specs["pooled"].dtype == "float32"
    assert specs["states"].dtype == "bfloat16"
    assert metadata["kind"] == "text"
    store = LatentStore(tmp_path)
    with safetensors.safe_open(shard, "np") as file:
        assert set(file.keys()) == {"spans", "entries", *next(iter(want.values()))}
        assert file.get_tensor("spans").tobytes() == store._files.tensors(store.info(0))["spans"].tobytes()


def test_one_caption_is_one_item():
    assert Caption("a").key != Caption("b").key
    assert Caption(("a", "b")).key != Caption(("ab",)).key
    assert Caption("\ud800").entry("", Encoding()).caption == "\\ud800"


def test_another_encoder_or_tokenizer_is_a_reason_and_the_unknown_is_none():
    def kinds(stored, wanted):
        rows = [Caption("a").entry("flux", Encoding(*one)).fingerprint for one in (stored, wanted)]
        return [reason.kind for reason in why_stale(*rows)]

    assert kinds(("e", "t"), ("e", "t")) == kinds(("e", "t"), ("", "")) == kinds(("", ""), ("e", "t")) == []
    assert kinds(("e", "t"), ("x", "t")) == [Stale.ENCODERS]
    assert kinds(("e", "t"), ("e", "x")) == [Stale.TOKENS]


def test_pack_and_prune_keep_every_bit(tmp_path):
    root = tmp_path / "text"
    want = fill_texts(root, 6, shard_bytes=1)
    want |= fill_texts(root, 2, seed=9, shard_bytes=1)  # of captions that are there already
    assert isinstance(LatentStore(root), LatentStore)
    store = LatentStore(root)
    assert (len(store), len(store.shards), store.replaced_rows()) == (6, 8, 2)
    pack_store(store, tmp_path / "copy")
    prune(store)
    assert LatentStore(root).replaced_rows() == 0
    pack_store(LatentStore(root))
    for folder in (root, tmp_path / "copy"):
        store = LatentStore(folder)
        assert len(store.shards) == 1
        assert verify(store) == []
        for i, key in enumerate(store.strings("source")):
            same_outputs(store.arrays(i), want[key])
    found = status(LatentStore(root))
    assert found.healthy
    assert (found.items, found.absent, found.changed) == (6, [], [])


def test_a_damaged_caption_is_an_error_and_the_others_are_kept(tmp_path):
    want = fill_texts(tmp_path, 5)
    store = LatentStore(tmp_path)
    shard = next((tmp_path / "shards").iterdir())
    info, start = store.info(2), store.packed(2)
    spans = store._files.tensors(store.info(2))["spans"]
    at = info.tensors["states"].offset + int(spans[int(store._row[2]), 2, 0]) * 64 * 2
    del start, spans
    store.release()
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(data)
    store = LatentStore(tmp_path)
    key = store.strings("source")[2]
    with pytest.raises(LatentStoreError, match=rf"{key}.*damaged.*cache prune .* --damaged"):
        store.arrays(2)
    assert [i for i, _ in verify(store)] == [2]
    assert [name for name, _ in prune(store, damaged=True).damaged] == [key]
    store = LatentStore(tmp_path)
    assert set(store.strings("source")) == set(want) - {key}
    for i, source in enumerate(store.strings("source")):
        same_outputs(store.arrays(i), want[source])


def flipped(root, rng):
    """Change one bit of one file of a store; its name."""
    victim = rng.choice([path for path in sorted(root.rglob("*")) if path.is_file()])
    data = bytearray(victim.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    victim.write_bytes(data)
    return victim.name


@pytest.mark.weekly
@pytest.mark.parametrize("indexed", [True, weekly(False)])
def test_a_flipped_bit_gives_no_wrong_number_and_what_it_costs_is_named(tmp_path, indexed):
    good, rng = tmp_path / "good", random.Random(0)
    want = fill_texts(good, 12, shard_bytes=5000)
    if indexed:
        write_manifest(LatentStore(good))
    costs = 0
    for turn in range(int(os.environ.get("KOHYA_BUCKET_SEEDS", "40"))):
        root = tmp_path / str(turn)
        shutil.copytree(good, root)
        name = flipped(root, rng)
        store, lost = LatentStore(root), set(want)
        for i, key in enumerate(store.strings("source")):
            with suppress(LatentStoreError):
                same_outputs(store.arrays(i), want[key])
                lost.discard(key)
        named = [key for key, _ in verify_files(store)] + [store.strings("source")[i] for i, _ in verify(store)]
        store.release()
        costs += bool(lost)
        assert not lost or named, name
        assert lost <= set(named) or name in named, (name, lost, named)
        shutil.rmtree(root)
    assert costs


def test_a_span_beyond_its_tensor_is_an_error(tmp_path):
    fill_texts(tmp_path, 2)
    store = LatentStore(tmp_path)
    store._files.tensors(store.info(0))["spans"][:, :, 1] += 1000  # of this process alone: the file stays
    with pytest.raises(LatentStoreError, match="lies outside its tensor"):
        store.arrays(1)


def test_latents_are_no_texts_and_texts_no_latents(tmp_path):
    from kohya_bucket.latents.store.writer import StoreWriter

    with StoreWriter(tmp_path / "latents") as writer:
        writer.add(entry("a.png", dtype="float32"), bits(0, "float32", "latents", (64, 32)), space=SPACE)
    assert type(LatentStore(tmp_path / "latents")) is LatentStore
    fill_texts(tmp_path / "text", 1)
    with pytest.raises(LatentStoreError, match="text-encoder outputs, not latents"):
        LatentStore(tmp_path / "text").gather([0])
    with StoreWriter(tmp_path / "text") as texts:
        for names in ((), ("spans",)):
            with pytest.raises(LatentStoreError, match="outputs"):
                texts.add_text(Caption("x").entry("", Encoding()), {name: pack(np.zeros(2)) for name in names})


def test_manifests_name_what_arrays_were_given_as(tmp_path):
    want = fill_texts(tmp_path, 3)
    write_manifest(LatentStore(tmp_path))
    opened = LatentStore(tmp_path)
    assert opened.indexed
    assert opened.unindexed == set()
    info = next(iter(opened.shards.values()))
    assert info.arrays["mask"] == ("<i8", 1)
    assert info.arrays["applied"] == ("|b1", 0)
    assert "arrays" in json.loads(json.dumps(info.to_json()))
    assert list(info.arrays) == sorted(next(iter(want.values())))


CHANGES = {
    "an array without a tensor": lambda d: d["arrays"].update(zzz=["<f4", 1]),
    "a tensor without an array": lambda d: d["arrays"].pop("mask"),
    "arrays in another order": lambda d: d.update(arrays=dict(reversed(d["arrays"].items()))),
    "no spans": lambda d: d["tensors"].pop("spans"),
    "spans of another type": lambda d: d["tensors"]["spans"].__setitem__(0, "float64"),
    "spans of other arrays": lambda d: d["tensors"]["spans"].__setitem__(1, [3, 3, 3]),
    "no items": lambda d: d["tensors"]["spans"].__setitem__(1, [0, 4, 3]),
    "a type that it was not given in": lambda d: d["arrays"]["pooled"].__setitem__(0, "<f2"),
    "no type": lambda d: d["arrays"]["pooled"].__setitem__(0, ["<f4"]),
    "objects": lambda d: d["arrays"]["pooled"].__setitem__(0, "|O"),
    "other axes": lambda d: d["arrays"]["states"].__setitem__(1, 1),
    "no axes": lambda d: d["arrays"]["applied"].__setitem__(1, True),
    "a huge row": lambda d: d["tensors"]["states"].__setitem__(1, [0, 1 << 40]),
    "arrays that are none": lambda d: d.update(arrays=[1]),
    "a file too short": lambda d: d.update(bytes=d["bytes"] - 100_000),
    "latents": lambda d: d.pop("arrays"),
    "latents by their numbers": lambda d: d["space"].update(values="raw"),
}


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_is_not_believed_that_cannot_be(tmp_path, change):
    fill_texts(tmp_path, 3)
    (info,) = LatentStore(tmp_path).shards.values()
    stated = json.loads(json.dumps(info.to_json()))
    assert ShardInfo.from_json(stated) == info
    CHANGES[change](stated)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        ShardInfo.from_json(stated)


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64", "uint8"])
def test_latents_are_not_of_the_types_that_only_texts_have(tmp_path, dtype):
    fill(tmp_path, ["a"], dtype="float32")
    (info,) = LatentStore(tmp_path).shards.values()
    stated = json.loads(json.dumps(info.to_json()))
    stated["tensors"]["latents"][0] = dtype
    stated["bytes"] *= 2
    with pytest.raises(ValueError, match="cannot hold the tensors"):
        ShardInfo.from_json(stated)
    stated = info.to_json()
    stated["space"]["values"] = "text"
    with pytest.raises(ValueError, match="its note says text outputs"):
        ShardInfo.from_json(stated)


@pytest.mark.long
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("bucket_width", 1), ("resized_height", -1), ("original_width", 8), ("crop_left", 3), ("ltrb_right", 1.5),
        ("flip", True), ("mask", True), ("mask_row", 0), ("row", 3), ("row", -1), ("written_ns", -1),
        ("kind", "latents"), ("kind", "x"), ("dtype", "float32"), ("dtype", "x"), ("source", "\0"),
    ],
)  # fmt: skip
def test_a_row_of_a_caption_is_not_believed_that_cannot_be(tmp_path, column, value):
    fill_texts(tmp_path, 3)
    store = LatentStore(tmp_path)
    check_rows(store.table, store.shards)
    rows = store.table.to_pylist()
    rows[1][column] = value
    with pytest.raises(LatentStoreError, match="bucket_width" if value == "latents" else column):
        check_rows(arrow()[0].Table.from_pylist(rows, schema=store.table.schema), store.shards)


def test_a_row_of_an_image_is_none_of_a_caption(tmp_path):
    fill(tmp_path, ["a"], dtype="float32")
    store = LatentStore(tmp_path)
    for changes in ({"dtype": "exact"}, {"kind": "text"}, {"kind": "text", "dtype": "exact"}, {"bucket_width": 0}):
        rows = [store.table.to_pylist()[0] | changes]
        for shards in (store.shards, {}) if "kind" not in changes or len(changes) == 1 else (store.shards,):
            with pytest.raises(LatentStoreError, match="impossible value"):
                check_rows(arrow()[0].Table.from_pylist(rows, schema=store.table.schema), shards)


@pytest.mark.parametrize("indexed", [False, True])
def test_who_writes_a_caption_later_wins_whatever_a_clock_said(tmp_path, indexed):
    ahead, caption = time.time_ns() + 10**18, Caption("a")
    for seed, number in enumerate((ahead, None, None)):
        with StoreWriter(tmp_path) as writer:
            arrays = {name: pack(array) for name, array in made_outputs(0, seed).items()}
            writer.add_text(caption.entry("flux", Encoding()), arrays, sequence=number)
        if indexed:
            write_manifest(LatentStore(tmp_path))
        store = LatentStore(tmp_path)
        same_outputs(store.arrays(0), made_outputs(0, seed))
    assert store.column("written_ns").tolist() == [ahead + 2]


def test_two_writers_of_one_caption_count_on_from_each_other(tmp_path):
    writers = [StoreWriter(tmp_path) for _ in range(2)]
    for seed in range(5):
        arrays = {name: pack(array) for name, array in made_outputs(0, seed).items()}
        writers[seed % 2].add_text(Caption("a").entry("flux", Encoding()), arrays)
        writers[seed % 2].flush()
        same_outputs(LatentStore(tmp_path).arrays(0), made_outputs(0, seed))


def test_latents_in_a_folder_of_captions_are_kept_as_they_are(tmp_path):
    """Nothing puts them there; what looks after a store must not lose them."""
    root = tmp_path / "both"
    want, latents = fill_texts(root, 3), fill(root, ["a", "b"])
    fill(root, ["a"], dtype="float32")
    assert verify(LatentStore(root)) == []
    prune(LatentStore(root))
    pack_store(LatentStore(root))
    assert prune(LatentStore(root), damaged=True).damaged == []
    store = LatentStore(root)
    assert (verify(store), verify_files(store), len(store)) == ([], [], 5)
    for i, key in enumerate(store.strings("source")):
        if key in want:
            same_outputs(store.arrays(i), want[key])
        elif key == "b":
            assert same(store.read(i), latents[key])
        else:
            with pytest.raises(LatentStoreError, match="is a latent"):
                store.arrays(i)


def test_packed_shards_of_several_layouts_are_left_alone(tmp_path):
    fill_texts(tmp_path, 2)
    with StoreWriter(tmp_path) as writer:
        writer.add_text(Caption("x").entry("flux", Encoding()), {"other": pack(np.zeros((3, 2), np.float32))})
    before = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert len(before) == 2
    assert pack_store(LatentStore(tmp_path)).copied == 0
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == before


@pytest.mark.parametrize(
    "outputs",
    [
        {"entries": np.zeros(2)}, {"__metadata__": np.zeros(2)}, {"a": np.zeros((1,) * 6)}, {"n" * 300: np.zeros(2)},
        {f"a{n}": np.zeros(1) for n in range(300)}, {"a": np.broadcast_to(np.float32(0), (1 << 28, 2))},
        {"a": np.zeros((2, 0, 1 << 30), np.float32)},
    ],
    ids=["own", "header", "axes", "name", "many", "long", "wide"],
)  # fmt: skip
def test_what_no_store_would_give_again_is_refused(tmp_path, outputs):
    packed = {}
    for name, array in outputs.items():
        long = len(array) > 1 << 20
        packed[name] = replace(pack(array[:2]), length=len(array)) if long else pack(array)
    with StoreWriter(tmp_path) as writer, pytest.raises(LatentStoreError, match="cannot be stored"):
        writer.add_text(Caption("a").entry("flux", Encoding()), packed)
    assert list((tmp_path / "shards").iterdir()) == []


def kill_writers(root, kills, captions):
    """(captions there after each kill, whether a kill fell when a part was done)."""
    chance, counts = random.Random(0), []
    for _ in range(kills):
        process = QUICK.Process(target=write_until_killed, args=(root, captions))
        process.start()
        while not (root / "ready").exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.25))
        process.kill()
        process.join()
        (root / "ready").unlink()
        there = 0
        if (root / "shards").is_dir():
            store = LatentStore(root)
            assert store.damage == []
            assert verify(store) == []
            known = {Caption(f"caption {number}").key: number for number in range(captions)}
            for i, key in enumerate(store.strings("source")):
                same_outputs(store.arrays(i), made_outputs(known[key]))
            told = set((root / "told").read_text(encoding="utf-8").split()) if (root / "told").exists() else set()
            assert told <= set(store.strings("source"))
            there = len(store)
        assert there >= (counts[-1] if counts else 0)
        counts.append(there)
    return counts


@pytest.mark.weekly
def test_killed_at_random_instants_a_store_keeps_what_was_committed(tmp_path):
    kills = int(os.environ.get("KOHYA_BUCKET_KILLS", "8"))
    (tmp_path / "text").mkdir()
    captions = 40 * kills
    counts = kill_writers(tmp_path / "text", kills, captions)
    print(f"{kills} killed; captions there: {counts}")
    write_until_killed(tmp_path / "text", captions)
    assert len(LatentStore(tmp_path / "text")) == captions


def test_damage_is_found_and_put_right_by_the_commands(tmp_path, command_line):
    fill_texts(tmp_path, 3)
    [shard] = (tmp_path / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[LatentStore(tmp_path).info(0).tensors["pooled"].offset] ^= 1
    shard.write_bytes(data)
    assert "3 items" in command_line("cache", "status", tmp_path)[1]
    code, said, errors = command_line("cache", "verify", tmp_path)
    assert (code, "its checksum is wrong" in said, "3 items read, 1 damaged" in said) == (1, True, True)
    assert "--damaged takes that out, and training encodes these captions again" in errors
    code, said, _ = command_line("cache", "prune", tmp_path, "--damaged")
    assert (code, "1 item dropped" in said) == (0, True)
    code, said, _ = command_line("cache", "verify", tmp_path)
    assert (code, "2 items read, 0 damaged" in said) == (0, True)
    fill_texts(tmp_path, 3)
    code, said, _ = command_line("cache", "verify", tmp_path)
    assert (code, "3 items read, 0 damaged" in said) == (0, True)
