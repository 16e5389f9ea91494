"""Outputs of text encoders: what was given is what is read, to the last bit, in as few bytes as the numbers allow."""

from __future__ import annotations

import json
import pickle
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.maintenance.pack import pack as pack_store
from kohya_bucket.latents.maintenance.prune import prune
from kohya_bucket.latents.maintenance.repair import repair
from kohya_bucket.latents.stale import Stale
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.shard_file import read_header
from kohya_bucket.latents.store.state import status, verify
from kohya_bucket.latents.store.writer import write_manifest
from kohya_bucket.latents.text.caption import ENCODING_COLUMNS, Caption, Encoding, why_text_stale
from kohya_bucket.latents.text.exact_arrays import pack, unpack
from kohya_bucket.latents.text.text_store import TextStore, open_store
from kohya_bucket.latents.text.text_writer import TextWriter
from tests.latents.latent_helpers import SPACE, bits, entry
from tests.latents.text_outputs import fill_texts, made_outputs, same_outputs, write_until_killed
from tests.warm import QUICK

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

TYPES = ["<f2", "<f4", "<f8", "|b1", "|u1", "|i1", "<u2", "<i2", "<i4", "<u4", "<i8"]
arrays = st.sampled_from(TYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


def bf16(values):
    return (np.asarray(values, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


@given(arrays, st.integers(0, 6), st.booleans())
@settings(max_examples=150, deadline=None)
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


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=10), st.sampled_from([1, 3000, 1 << 30]))
@settings(max_examples=25, deadline=None)
def test_everything_written_is_read_back(tmp_path_factory, chosen, shard_bytes):
    root = tmp_path_factory.mktemp("store")
    want = {}
    with TextWriter(root, shard_bytes=shard_bytes) as writer:
        for number, seed in chosen:
            caption = Caption(f"caption {number}")
            want[caption.key] = made_outputs(number, seed)
            writer.add_text(
                caption.entry("flux", Encoding("e", "t")), {k: pack(v) for k, v in want[caption.key].items()}
            )
    for opened in (TextStore(root), TextStore(root, verify="always")):
        write_manifest(opened)
        opened = pickle.loads(pickle.dumps(TextStore(root)))
        assert (opened.indexed, opened.damage, verify(opened)) == (True, [], [])
        assert opened.strings("source") == sorted(want)
        for i, key in enumerate(opened.strings("source")):
            same_outputs(opened.arrays(i), want[key])
            assert opened.entry(i).fingerprint.vae == "e"
            assert opened.entry(i).caption.startswith("caption ")


def test_a_shard_is_a_file_of_safetensors_with_an_array_of_all_captions_in_each_tensor(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    want = fill_texts(tmp_path, 3)
    shard = next((tmp_path / "shards").glob("*.safetensors"))
    specs, _, metadata = read_header(shard)
    assert next(iter(specs)) == "spans"
    assert specs["spans"].shape == (3, 4, 3)
    assert specs["pooled"].dtype == "float32"
    assert specs["states"].dtype == "bfloat16"
    assert metadata["kind"] == "text"
    with safetensors.safe_open(shard, "np") as file:
        assert set(file.keys()) == {"spans", "entries", *next(iter(want.values()))}
        assert file.get_tensor("spans").tobytes() == TextStore(tmp_path)._tensors(0)["spans"].tobytes()


def test_one_caption_is_one_item_and_how_often_it_is_left_out_another():
    assert Caption("a").key == Caption("a", 0.0).key != Caption("a", 0.1).key
    assert Caption("a").key != Caption("b").key
    assert Caption(("a", "b")).key != Caption(("ab",)).key
    assert Caption("\ud800").entry("", Encoding()).caption == "\\ud800"


def test_another_encoder_or_tokenizer_is_a_reason_and_the_unknown_is_none():
    stored = Encoding("e", "t")
    assert why_text_stale(stored, Encoding("e", "t")) == why_text_stale(stored, Encoding()) == []
    assert why_text_stale(Encoding(), stored) == []
    kinds = [[reason.kind for reason in why_text_stale(stored, Encoding(*other))] for other in (("x", "t"), ("e", "x"))]
    assert kinds == [[Stale.ENCODERS], [Stale.TOKENS]]
    row = Caption("a").entry("flux", stored).fingerprint
    assert Encoding(*(getattr(row, name) for name in ENCODING_COLUMNS)) == stored


def test_pack_prune_and_repair_keep_every_bit(tmp_path):
    root = tmp_path / "text"
    want = fill_texts(root, 6, shard_bytes=1)
    want |= fill_texts(root, 2, seed=9, shard_bytes=1)  # of captions that are there already
    assert isinstance(open_store(root), TextStore)
    store = TextStore(root)
    assert (len(store), len(store.shards), store.rows_on_disk()) == (6, 8, 8)
    pack_store(store, tmp_path / "copy")
    prune(store)
    assert TextStore(root).rows_on_disk() == 6
    pack_store(TextStore(root))
    for folder in (root, tmp_path / "copy"):
        store = TextStore(folder)
        assert len(store.shards) == 1
        assert verify(store) == []
        for i, key in enumerate(store.strings("source")):
            same_outputs(store.arrays(i), want[key])
    found = status(TextStore(root))
    assert found.healthy
    assert (found.items, found.absent, found.changed) == (6, [], [])


def test_a_damaged_caption_is_an_error_and_the_others_are_kept(tmp_path):
    want = fill_texts(tmp_path, 5)
    store = TextStore(tmp_path)
    shard = next((tmp_path / "shards").iterdir())
    info, start = store.info(2), store.packed(2)
    spans = store._tensors(2)["spans"]
    at = info.tensors["states"].offset + int(spans[int(store._row[2]), 2, 0]) * 64 * 2
    del start, spans
    store.release()
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(data)
    store = TextStore(tmp_path)
    key = store.strings("source")[2]
    with pytest.raises(LatentStoreError, match=rf"{key}.*damaged.*cache repair"):
        store.arrays(2)
    assert [i for i, _ in verify(store)] == [2]
    done = repair(store)
    assert done.missing == [key]
    assert len(done.damaged) == 1
    store = TextStore(tmp_path)
    assert set(store.strings("source")) == set(want) - {key}
    for i, source in enumerate(store.strings("source")):
        same_outputs(store.arrays(i), want[source])


def test_a_span_beyond_its_tensor_is_an_error(tmp_path):
    fill_texts(tmp_path, 2)
    store = TextStore(tmp_path)
    store._tensors(0)["spans"][:, :, 1] += 1000  # of this process alone: the file stays
    with pytest.raises(LatentStoreError, match="lies outside of it"):
        store.arrays(1)


def test_latents_are_no_texts_and_texts_no_latents(tmp_path):
    from kohya_bucket.latents.store.writer import StoreWriter

    with StoreWriter(tmp_path / "latents") as writer:
        writer.add(entry("a.png", dtype="float32"), bits(0, "float32", "latents", (64, 32)), space=SPACE)
    assert type(open_store(tmp_path / "latents")) is LatentStore
    fill_texts(tmp_path / "text", 1)
    with pytest.raises(LatentStoreError, match="outputs of text encoders, not latents"):
        TextStore(tmp_path / "text").gather([0])
    with TextWriter(tmp_path / "text") as texts:
        for names in ((), ("spans",)):
            with pytest.raises(LatentStoreError, match="cannot be stored"):
                texts.add_text(Caption("x").entry("", Encoding()), {name: pack(np.zeros(2)) for name in names})


def test_manifests_name_what_arrays_were_given_as(tmp_path):
    want = fill_texts(tmp_path, 3)
    write_manifest(TextStore(tmp_path))
    opened = TextStore(tmp_path)
    assert opened.indexed
    assert opened.unindexed == set()
    info = next(iter(opened.shards.values()))
    assert info.arrays["mask"] == ("<i8", 1)
    assert info.arrays["applied"] == ("|b1", 0)
    assert "arrays" in json.loads(json.dumps(info.to_json()))
    assert opened.scalars(0) == {"applied": np.True_}
    assert opened.names(0) == tuple(sorted(next(iter(want.values()))))


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
            store = TextStore(root)
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


@pytest.mark.parametrize("kills", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_at_random_instants_a_store_keeps_what_was_committed(tmp_path, kills):
    (tmp_path / "text").mkdir()
    captions = 40 * kills
    counts = kill_writers(tmp_path / "text", kills, captions)
    print(f"{kills} killed; captions there: {counts}")
    write_until_killed(tmp_path / "text", captions)
    assert len(TextStore(tmp_path / "text")) == captions
