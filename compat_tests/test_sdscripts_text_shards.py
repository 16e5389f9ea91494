"""Text-encoder outputs in shards: what the trainer is given is what sd-scripts' own npz give it, to the last bit."""

import importlib.util
import pickle
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from sdscripts_support import build_groups, random_sizes, write_images
from small_text_encoders import Family, make_family
from test_sdscripts_caching import ACCELERATOR, strategies  # noqa: F401
from test_sdscripts_caching_ranks import run_ranks
from test_sdscripts_text_caches import strategy_type  # noqa: F401

from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.trainers import sdscripts

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

KEYS = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
KINDS = ("TokenizeStrategy", "TextEncodingStrategy", "TextEncoderOutputsCachingStrategy")
FAMILIES = [("sdxl", {}), ("flux", {"mask": True}), ("flux", {"mask": False})]


@pytest.fixture
def bases(strategies):  # noqa: F811
    """sd-scripts' strategies; what a test sets is taken out again."""
    yield strategies.base
    for kind in KINDS:
        getattr(strategies.base, kind)._strategy = None


@contextmanager
def adapter():
    sdscripts.install()
    try:
        yield
    finally:
        sdscripts.uninstall()


class Run:
    """One run's caching and its batches: `encoded` captions, `outputs` by image, `batches` as they come."""

    def __init__(self, sd, bases, family, folders, table=None, accelerator=ACCELERATOR, **subset):
        subsets = [{"image_dir": str(folder), "caption_extension": ".txt", **subset} for folder in folders]
        config = {"datasets": [{**KEYS, "subsets": [one]} for one in subsets]}
        self.group, _ = build_groups(sd, config | ({"kohya_bucket": table} if table else {}))
        for kind, strategy in zip(KINDS, family, strict=False):
            getattr(bases, kind)._strategy = strategy
        self.encoded = []
        encode = type(family.caching).cache_batch_outputs

        def cache_batch_outputs(tokenizing, models, encoding, infos):
            self.encoded += [info.caption for info in infos]
            encode(family.caching, tokenizing, models, encoding, infos)

        family.caching.cache_batch_outputs = cache_batch_outputs
        self.group.new_cache_text_encoder_outputs(family.models, accelerator)
        del family.caching.cache_batch_outputs
        self.group.set_current_strategies()

    def read(self):
        self.outputs, self.batches = {}, []
        for k, dataset in enumerate(self.group.datasets):
            dataset.debug_dataset = True
            for i in range(len(dataset)):
                batch = dataset[i]
                self.batches.append(batch)
                for j, key in enumerate(batch["image_keys"]):
                    self.outputs[k, Path(key).name] = [part[j] for part in batch["text_encoder_outputs_list"]]
        return self


def same_bits(found, want):
    """Equal in structure, types, shapes and bytes."""
    assert type(found) is type(want)
    if isinstance(found, dict):
        assert found.keys() == want.keys()
        for key in found:
            same_bits(found[key], want[key])
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(want)
        for one, other in zip(found, want, strict=True):
            same_bits(one, other)
    elif isinstance(found, (torch.Tensor, np.ndarray)):
        assert (found.dtype, found.shape) == (want.dtype, want.shape)
        assert np.asarray(found).tobytes() == np.asarray(want).tobytes()
    else:
        assert found == want


def write(folder, count=7, captions=None):
    paths = write_images(folder, random_sizes(count, 1, 100, 300))
    for number, path in enumerate(paths):
        text = f"a picture of number {number}, with words" if captions is None else captions[number % len(captions)]
        path.with_suffix(".txt").write_text(text, encoding="utf-8")
    return paths


def shards(tmp_path):
    return {"text_cache": "shards", "latent_cache_dir": str(tmp_path / "store")}


@pytest.mark.parametrize(("name", "options"), FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_batches_are_those_of_sd_scripts_own_npz(unpatched, bases, tmp_path, name, options, dtype):
    write(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "alone")
    alone = Run(unpatched, bases, make_family(name, dtype, **options), [tmp_path / "alone"]).read()
    assert len(list((tmp_path / "alone").glob("*.npz"))) == 7
    with adapter():
        family = make_family(name, dtype, **options)
        stored = Run(unpatched, bases, family, [tmp_path / "a"], shards(tmp_path)).read()
        assert (len(stored.encoded), len(alone.encoded)) == (7, 7)
        assert not list((tmp_path / "a").glob("*.npz"))
        same_bits(stored.outputs, alone.outputs)
        own = Run(unpatched, bases, make_family(name, dtype, **options), [tmp_path / "a"]).read()
        same_bits(stored.batches, own.batches)
        again = Run(unpatched, bases, make_family(name, dtype, **options), [tmp_path / "a"], shards(tmp_path)).read()
        assert again.encoded == []
        same_bits(again.batches, stored.batches)
        carried = pickle.loads(pickle.dumps(again.group.datasets[0].text_encoder_output_caching_strategy))
        for info in again.group.datasets[0].image_data.values():
            npz = (tmp_path / "alone" / Path(info.absolute_path).name).with_suffix("")
            want = family.caching.__class__.load_outputs_npz(family.caching, f"{npz}{suffix_of(family)}")
            same_bits(carried.load_outputs_npz(info.text_encoder_outputs_npz), want)
    info = next(iter(LatentStore(tmp_path / "store" / "text").shards.values()))
    kept = {name: spec.dtype for name, spec in info.tensors.items() if name in ("hidden_state1", "t5_out")}
    assert set(kept.values()) == {str(dtype).removeprefix("torch.")}


def suffix_of(family):
    return family.caching.__class__.get_outputs_npz_path(family.caching, "x.png").removeprefix("x")


def test_one_item_for_each_caption_whatever_the_data_set(unpatched, bases, tmp_path):
    write(tmp_path / "a", 7, ["one", "two two", "three"])
    write(tmp_path / "b", 5, ["two two", "four"])
    with adapter():
        folders = [tmp_path / "a", tmp_path / "b"]
        run = Run(unpatched, bases, make_family("flux"), folders, shards(tmp_path)).read()
        assert sorted(run.encoded) == ["four", "one", "three", "two two"]
        own = Run(unpatched, bases, make_family("flux"), folders).read()
        same_bits(run.batches, own.batches)
        assert len(own.encoded) == 12
    assert len(LatentStore(tmp_path / "store" / "text")) == 4


def test_two_ranks_share_captions(unpatched, bases, tmp_path):
    write(tmp_path / "a", 9, ["one", "two", "three", "four", "five"])
    encoded = []
    with adapter():
        for rank in (1, 0):
            accelerator = type(ACCELERATOR)(**{**vars(ACCELERATOR), "num_processes": 2, "process_index": rank})
            try:
                run = Run(unpatched, bases, make_family("sdxl"), [tmp_path / "a"], shards(tmp_path), accelerator)
            except SystemExit:  # alone, the first has not the other's
                assert rank == 1
                run = None
            encoded.append(len(LatentStore(tmp_path / "store" / "text")))
        assert encoded[1] == 5
        assert encoded[0] in (2, 3)
        assert len(run.encoded) == 5 - encoded[0]


@pytest.mark.slow
@pytest.mark.usefixtures("bases")
def test_real_ranks_encode_each_caption_once_and_wait_for_each_other(sd_scripts_dir, tmp_path):
    captions = [f"caption {number}" for number in range(7)]
    paths = write(tmp_path / "a", 12, captions)
    subset = {"image_dir": str(tmp_path / "a"), "caption_extension": ".txt"}
    config = {"datasets": [{**KEYS, "subsets": [subset]}], "kohya_bucket": shards(tmp_path)}
    ranks = run_ranks("text_caching_script.py", config, sd_scripts_dir, tmp_path, "--seconds", "3")
    assert sorted(ranks[0]["encoded"] + ranks[1]["encoded"]) == captions
    assert len(ranks[0]["encoded"]) in (3, 4)
    assert ranks[0]["seen"] == ranks[1]["seen"]
    assert set(ranks[0]["seen"]) == {path.name for path in paths}
    assert len(set(ranks[0]["seen"].values())) == len(captions)
    assert ranks[0]["again"] == ranks[1]["again"] == []
    assert ranks[0]["seconds"] > 5  # longer than the process group would wait


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_what_outputs_depend_on_is_encoded_again(unpatched, bases, tmp_path, caplog, name):
    paths = write(tmp_path / "a", 3)

    def encoded(change=None, **options):
        caplog.clear()
        family = make_family(name, **options)
        if change:
            with torch.no_grad():
                change(family)
        with adapter(), caplog.at_level("WARNING", logger="kohya_bucket"):
            return len(Run(unpatched, bases, family, [tmp_path / "a"], shards(tmp_path)).encoded)

    assert [encoded(), encoded()] == [3, 0]
    assert encoded(lambda family: next(family.models[1].parameters()).add_(1)) == 3
    assert "the text encoders changed" in caplog.text
    assert encoded() == 3
    assert encoded(salt="other") == 3
    assert "how captions are encoded changed" in caplog.text
    assert encoded() == 3
    with torch.autocast("cpu", torch.bfloat16):
        assert encoded() == 3
    assert encoded() == 3
    paths[1].with_suffix(".txt").write_text("another caption", encoding="utf-8")
    assert [encoded(), encoded()] == [1, 0]
    if name == "flux":
        assert [encoded(mask=False), encoded(mask=False)] == [3, 0]
        assert "apply_t5_attn_mask=True" in caplog.text or encoded(mask=True) == 3
        assert encoded(length=128) == 3


def test_how_often_a_caption_is_left_out_is_part_of_it(unpatched, bases, strategy_type, tmp_path):  # noqa: F811
    if not hasattr(unpatched.train_util.ImageInfo("", 1, "", False, ""), "caption_dropout_rate"):
        pytest.skip("this version caches no text-encoder outputs of captions that may be left out")
    write(tmp_path / "a", 4, ["one", "two"])

    def run(rate):
        family = Family(None, None, strategy_type(True, 1, False), [])
        return Run(
            unpatched, bases, family, [tmp_path / "a"], shards(tmp_path), caption_dropout_rate=rate
        ).read()  # fmt: skip

    with adapter():
        for rate, count in ((0.1, 2), (0.3, 2), (0.1, 0), (0.0, 2), (0.3, 0)):
            found = run(rate)
            assert len(found.encoded) == count
            assert {outputs[1].item() for outputs in found.outputs.values()} == {float(np.float32(rate))}
    assert len(LatentStore(tmp_path / "store" / "text")) == 6


def test_loader_workers_read_through_the_store(unpatched, bases, tmp_path):
    write(tmp_path / "a", 6)
    with adapter():
        run = Run(unpatched, bases, make_family("flux"), [tmp_path / "a"], shards(tmp_path)).read()
        epoch = torch.multiprocessing.get_context("fork").Value("i", 1)
        collator = unpatched.train_util.collator_class(epoch, epoch, run.group)
        loader = torch.utils.data.DataLoader(
            run.group, batch_size=1, shuffle=True, collate_fn=collator, num_workers=2, multiprocessing_context="fork"
        )
        seen = {}
        for batch in loader:
            for j, key in enumerate(batch["image_keys"]):
                seen[0, Path(key).name] = [part[j] for part in batch["text_encoder_outputs_list"]]
        same_bits(dict(sorted(seen.items())), dict(sorted(run.outputs.items())))


def test_an_interrupted_run_keeps_what_it_encoded(unpatched, bases, tmp_path):
    write(tmp_path / "a", 8)
    family = make_family("sdxl")
    encode = type(family.encoding).encode_tokens
    calls = []

    def encode_tokens(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(family.encoding, *args)

    family.encoding.encode_tokens = encode_tokens
    with adapter():
        with pytest.raises(KeyboardInterrupt):
            Run(unpatched, bases, family, [tmp_path / "a"], shards(tmp_path))
        assert len(LatentStore(tmp_path / "store" / "text")) == 4
        assert len(Run(unpatched, bases, make_family("sdxl"), [tmp_path / "a"], shards(tmp_path)).encoded) == 4


def test_a_reader_that_does_more_than_read_is_refused_in_one_line(unpatched, bases, tmp_path):
    write(tmp_path / "a", 2)
    family = make_family("sdxl")

    class Changing(type(family.caching)):
        def load_outputs_npz(self, npz_path):
            return [array * 2 for array in super().load_outputs_npz(npz_path)]

    family.caching.__class__ = Changing
    said = r'its reader does more than return arrays of an npz \(it changes them\). Use text_cache = "npz"'
    with adapter(), pytest.raises(SystemExit, match=said):
        Run(unpatched, bases, family, [tmp_path / "a"], shards(tmp_path))
    assert len(LatentStore(tmp_path / "store" / "text")) == 0


def test_what_is_stale_is_not_trained_where_nothing_new_was_saved(unpatched, bases, tmp_path):
    write(tmp_path / "a", 2)
    with adapter():
        Run(unpatched, bases, make_family("sdxl"), [tmp_path / "a"], shards(tmp_path))
        family = make_family("sdxl", salt="other")

        class Elsewhere(type(family.caching)):
            def cache_batch_outputs(self, tokenize_strategy, models, text_encoding_strategy, batch):
                pass

        family.caching.__class__ = Elsewhere
        with pytest.raises(SystemExit, match="2 of 2 captions were not encoded into"):
            Run(unpatched, bases, family, [tmp_path / "a"], shards(tmp_path))


def test_without_pyarrow_the_option_is_refused_before_anything_is_read(patched, monkeypatch, tmp_path):
    if not hasattr(patched.train_util.BaseDataset, "new_cache_text_encoder_outputs"):
        pytest.skip("this version refuses the option for another reason")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "pyarrow" else find(name, *args)
    )
    write(tmp_path / "a", 2)
    config = {"datasets": [{**KEYS, "subsets": [{"image_dir": str(tmp_path / "a")}]}], "kohya_bucket": shards(tmp_path)}
    with pytest.raises(SystemExit, match="text_cache = 'shards' needs pyarrow"):
        build_groups(patched, config)
    assert not (tmp_path / "store").exists()


def test_a_version_without_strategies_refuses_the_option(patched, tmp_path):
    if hasattr(patched.train_util.BaseDataset, "new_cache_text_encoder_outputs"):
        pytest.skip("this version caches text-encoder outputs by strategies")
    write(tmp_path / "a", 2)
    config = {"datasets": [{**KEYS, "subsets": [{"image_dir": str(tmp_path / "a")}]}], "kohya_bucket": shards(tmp_path)}
    with pytest.raises(SystemExit, match=r"0\.10 or newer"):
        build_groups(patched, config)
