"""Cached text-encoder outputs: what the trainer is given is what sd-scripts alone gives it, to the last bit."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from sdscripts_support import ACCELERATOR, build_groups, random_sizes, write_images
from small_text_encoders import make_family
from test_sdscripts_caching_ranks import run_ranks

from kohya_bucket.trainers import sdscripts

KEYS = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
KINDS = ("TokenizeStrategy", "TextEncodingStrategy", "TextEncoderOutputsCachingStrategy")
FAMILIES = [("sdxl", {}), ("flux", {"mask": True}), ("flux", {"mask": False})]


@pytest.fixture
def bases(unpatched):
    """sd-scripts' strategies; what a test sets is taken out again."""
    from library import strategy_base

    yield strategy_base
    for kind in KINDS:
        getattr(strategy_base, kind)._strategy = None


@contextmanager
def adapter():
    sdscripts.install()
    try:
        yield
    finally:
        sdscripts.uninstall()


class Run:
    """One run's caching and its batches: `encoded` captions, `outputs` by image, `batches` as they come."""

    def __init__(self, sd, bases, family, folders, accelerator=ACCELERATOR):
        subsets = [{"image_dir": str(folder), "caption_extension": ".txt"} for folder in folders]
        config = {"datasets": [{**KEYS, "subsets": [one]} for one in subsets]}
        self.group, _ = build_groups(sd, config)
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


def write(folder, count=7):
    paths = write_images(folder, random_sizes(count, 1, 100, 300))
    for number, path in enumerate(paths):
        path.with_suffix(".txt").write_text(f"a picture of number {number}, with words", encoding="utf-8")
    return paths


@pytest.mark.parametrize(("name", "options"), FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batches_are_those_of_sd_scripts_alone(unpatched, bases, tmp_path, name, options, dtype):
    write(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "alone")
    alone = Run(unpatched, bases, make_family(name, dtype, **options), [tmp_path / "alone"]).read()
    numpys_savez = np.savez
    with adapter():
        run = Run(unpatched, bases, make_family(name, dtype, **options), [tmp_path / "a"]).read()
        assert np.savez is numpys_savez
        assert len(run.encoded) == len(alone.encoded) == 7
        again = Run(unpatched, bases, make_family(name, dtype, **options), [tmp_path / "a"]).read()
    assert again.encoded == []
    same_bits(run.outputs, alone.outputs)
    same_bits(again.outputs, alone.outputs)
    for file in (tmp_path / "alone").glob("*.npz"):
        theirs, ours = (dict(np.load(folder / file.name)) for folder in (file.parent, tmp_path / "a"))
        same_bits({key: ours[key] for key in theirs}, theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("bases")
def test_real_ranks_encode_each_image_once_and_wait_for_each_other(sd_scripts_dir, tmp_path):
    paths = write(tmp_path / "a", 12)
    subset = {"image_dir": str(tmp_path / "a"), "caption_extension": ".txt"}
    config = {"datasets": [{**KEYS, "subsets": [subset]}]}
    ranks = run_ranks("text_caching_script.py", config, sd_scripts_dir, tmp_path, "--seconds", "2")
    assert sorted(ranks[0]["encoded"] + ranks[1]["encoded"]) == sorted(
        path.with_suffix(".txt").read_text(encoding="utf-8") for path in paths
    )
    assert len(ranks[0]["encoded"]) == len(ranks[1]["encoded"]) == 6
    assert ranks[0]["seen"] == ranks[1]["seen"]
    assert set(ranks[0]["seen"]) == {path.name for path in paths}
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
            return len(Run(unpatched, bases, family, [tmp_path / "a"]).encoded)

    assert [encoded(), encoded()] == [3, 0]
    assert encoded(lambda family: next(family.models[1].parameters()).add_(1)) == 3
    assert "the text encoders changed" in caplog.text
    assert encoded() == 3
    assert encoded(salt="other") == 3
    assert "how captions are encoded changed" in caplog.text
    assert encoded() == 3
    paths[1].with_suffix(".txt").write_text("another caption", encoding="utf-8")
    assert [encoded(), encoded()] == [1, 0]


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
            Run(unpatched, bases, family, [tmp_path / "a"])
        kept = len(list((tmp_path / "a").glob("*.npz")))
        assert kept >= 4
        assert len(Run(unpatched, bases, make_family("sdxl"), [tmp_path / "a"]).encoded) == 8 - kept
