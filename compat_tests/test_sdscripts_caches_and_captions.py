"""What the real sd-scripts refuses beside its caches and trains of captions, against what `plan` and `doctor` say."""

import argparse
import ast
import importlib
import inspect
import json
import logging
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from kohya_bucket.trainers.sdscripts.config import Config, Release, Severity, read_config
from kohya_bucket.trainers.sdscripts.config.caches import IGNORING, NO_TEXT_CACHE, REFUSALS
from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER, trainer_named

BASE = {"resolution": 64, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 128}
OF_SUBSETS = {
    "color_aug": True, "random_crop": True, "shuffle_caption": True, "token_warmup_step": 2,
    "caption_tag_dropout_rate": 0.5, "caption_dropout_rate": 0.5, "flip_aug": True, "keep_tokens": 1,
    "caption_dropout_every_n_epochs": 2, "enable_wildcard": True, "caption_prefix": "p",
}  # fmt: skip
ASKED = {"cache_latents": "is_latent_cacheable", "cache_text_encoder_outputs": "is_text_encoder_output_cacheable"}


@pytest.fixture(scope="module")
def real(unpatched: SimpleNamespace) -> Iterator[SimpleNamespace]:
    parser = argparse.ArgumentParser()
    unpatched.train_util.add_dataset_arguments(parser, True, True, True)
    unpatched.train_util.add_training_arguments(parser, True)
    release = Release.in_checkout(unpatched.root)
    parser.add_argument("--validation_seed", type=int, default=None)
    parser.add_argument("--validation_split", type=float, default=0.0)
    base = importlib.import_module("library.strategy_base").LatentsCachingStrategy
    before = base._strategy
    base._strategy = importlib.import_module("library.strategy_sd").SdSdxlLatentsCachingStrategy(True, False, 1, False)
    logging.disable(logging.CRITICAL)
    yield SimpleNamespace(**vars(unpatched), release=release, parser=parser)
    logging.disable(logging.NOTSET)
    base._strategy = before


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "img").mkdir()
    return tmp_path


def picture(name: str, caption: str | None = "a cat, red") -> None:
    Image.new("RGB", (64, 64)).save(f"img/{name}.png")
    if caption is not None:
        Path(f"img/{name}.txt").write_bytes(caption.encode("utf-8"))


def config_of(dataset: dict[str, Any] | None = None, **subset: Any) -> dict[str, Any]:
    return {
        "datasets": [
            {**BASE, **(dataset or {}), "subsets": [{"image_dir": "img", "caption_extension": ".txt", **subset}]}
        ]
    }


def ours(config: dict[str, Any], real: SimpleNamespace, given: dict[str, Any] | None = None, arch: str = "") -> Config:
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    trainer = trainer_named(arch) if arch else ANY_TRAINER
    return read_config("config.json", given, release=real.release, programs=trainer)


def theirs(config: dict[str, Any], real: SimpleNamespace) -> Any:
    args = real.parser.parse_args([])
    real.train_util.prepare_dataset_args(args, True)
    sanitizer = real.config_util.ConfigSanitizer(True, True, True, True)
    blue = real.config_util.BlueprintGenerator(sanitizer).generate(config, args)
    built = real.config_util.generate_dataset_group_by_blueprint(blue.dataset_group)
    return built if isinstance(built, tuple) else (built, None)


def trainers_in(root: Path, *folders: str) -> dict[str, str]:
    files = [file for folder in (".", *folders) for file in sorted((root / folder).glob("*.py"))]
    return {file.name: file.read_text(encoding="utf-8-sig") for file in files}


def conflicts(config: Config) -> set[tuple[str, ...]]:
    return {f.names for f in config.findings.of(Severity.ERROR) if f.code == "cache-conflict"}


@pytest.mark.parametrize("setting", OF_SUBSETS)
def test_each_setting_beside_each_cache(there: Path, real: SimpleNamespace, setting: str) -> None:
    picture("a")
    config = config_of(**{setting: OF_SUBSETS[setting]})
    group, _ = theirs(config, real)
    for cache, question in ASKED.items():
        allowed = getattr(group, question)()
        assert (conflicts(ours(config, real, {cache: True})) == set()) == allowed
        assert conflicts(ours(config, real)) == set()
        if "cache_supports_dropout" in inspect.signature(getattr(group, question)).parameters:
            for_anima = getattr(group, question)(cache_supports_dropout=True)
            assert (conflicts(ours(config, real, {cache: True}, "anima")) == set()) == for_anima


def test_the_table_names_the_trainers_that_ask(real: SimpleNamespace) -> None:
    """By their source: which of the trainers known here ask whether text outputs, or latents, can be cached."""
    known = {name: text for name, text in trainers_in(real.root).items() if name in ANY_TRAINER.steps}
    assert known
    asks = {name for name, text in known.items() if "is_text_encoder_output_cacheable(" in text}
    caching = {
        name for name, text in known.items() if "cache_text_encoder_outputs" in text and name not in NO_TEXT_CACHE
    }
    assert asks == caching - set(IGNORING)
    with_dropout = {name for name, text in known.items() if "cache_supports_dropout=True" in text}
    takes = next(set(one.takes) for one in REFUSALS if one.setting == "caption_dropout_rate")
    assert with_dropout == (takes - set(IGNORING)) & known.keys()
    base = "train_network.py"  # asks for all that build on it
    latents = {name for name, text in known.items() if "is_latent_cacheable()" in text}
    own = [name for name, text in known.items() if "def train(" in text]  # others only lead to a trainer's new name
    assert all(name in latents or "_network" in name or "textual" in name for name in own)
    assert base in latents


def test_every_assertion_about_the_caches_is_in_the_table(real: SimpleNamespace) -> None:
    """Whatever a trainer asserts or raises with the name of a cache in its condition names a setting of the table."""
    settings = {one.setting for one in REFUSALS} | set(ASKED.values())
    found = 0
    for name, text in trainers_in(real.root, "library").items():
        if name.endswith("_old.py") or "XTI" in name:
            continue
        tree = ast.parse(text)
        parents = {inner: outer for outer in ast.walk(tree) for inner in ast.iter_child_nodes(outer)}
        for node in ast.walk(tree):
            tests = [node.test] if isinstance(node, ast.Assert) else []
            outer = parents.get(node)
            if isinstance(outer, ast.If) and (tests or isinstance(node, ast.Raise)):
                tests.append(outer.test)
            condition = " ".join(map(ast.unparse, tests))
            if re.search(r"\bcache_(latents|text_encoder_outputs)\b", condition):
                found += 1
                assert any(setting in condition for setting in settings), (name, condition)
    assert found > 10


NETWORKS = {
    "sdxl_train_network": "SdxlNetworkTrainer", "flux_train_network": "FluxNetworkTrainer",
    "sd3_train_network": "Sd3NetworkTrainer", "hunyuan_image_train_network": "HunyuanImageNetworkTrainer",
    "lumina_train_network": "LuminaNetworkTrainer", "anima_train_network": "AnimaNetworkTrainer",
}  # fmt: skip


class Settings(argparse.Namespace):
    """A trainer's options, of which those that nobody set are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "setting", ["shuffle_caption", "caption_dropout_rate", "caption_tag_dropout_rate", "flip_aug", "te"]
)
def test_the_trainers_own_checks(there: Path, real: SimpleNamespace, name: str, setting: str) -> None:
    if not (real.root / f"{name}.py").is_file():
        pytest.skip(f"this version has no {name}.py")
    picture("a")
    trained = setting == "te"
    config = config_of(dataset={"bucket_reso_steps": 64}, **({} if trained else {setting: OF_SUBSETS[setting]}))
    group, _ = theirs(config, real)
    trainer = getattr(importlib.import_module(name), NETWORKS[name])()
    args = Settings(
        cache_text_encoder_outputs=True, network_train_unet_only=not trained, min_timestep=0, max_timestep=1000
    )
    further = (None,) if len(inspect.signature(trainer.assert_extra_args).parameters) > 2 else ()
    try:
        trainer.assert_extra_args(args, group, *further)
    except AssertionError:
        refused = True
    else:
        refused = False
    given = {
        "cache_text_encoder_outputs": True,
        "network_module": "networks.lora",
        "network_train_unet_only": not trained,
    }
    assert bool(conflicts(ours(config, real, given, f"{name}.py"))) == refused


def test_masks_of_inpainting(there: Path, real: SimpleNamespace) -> None:
    if "train_inpainting" not in inspect.getsource(real.train_util.verify_training_args):
        pytest.skip("this version has no train_inpainting")
    picture("a")
    args = Settings(train_inpainting=True, cache_latents=True)
    with pytest.raises(ValueError, match="train_inpainting and cache_latents"):
        real.train_util.verify_training_args(args)
    given = {"train_inpainting": True, "cache_latents": True}
    assert conflicts(ours(config_of(), real, given)) == {("cache_latents", "train_inpainting")}


def text(draws: random.Random) -> str:
    line = ["", " ", "a cat, red", "{red|blue} cat", "one\t", "tag {{x}}", "ﬁ, é"]
    lines = [draws.choice(line) for _ in range(draws.randint(1, 4))]
    made = draws.choice(["\n", "\r\n", "\r"]).join(lines) + draws.choice(["", "\n", "\n\n"])
    return (draws.choice(["", "", "\ufeff"]) + made) or "x"


@pytest.mark.parametrize("wildcards", [False, True])
def test_what_is_trained_of_captions(there: Path, real: SimpleNamespace, wildcards: bool) -> None:
    """A law over made-up caption files: what is named is what the real reader leaves out or drags along."""
    draws = random.Random(4)
    files = {f"{i:03}": text(draws) for i in range(300)}
    for name, caption in files.items():
        picture(name, caption)
    config = config_of(enable_wildcard=wildcards)
    group, _ = theirs(config, real)
    (dataset,) = group.datasets
    trained = {}
    for info in dataset.image_data.values():
        processed = [dataset.process_caption(dataset.subsets[0], info.caption) for _ in range(60 if wildcards else 1)]
        trained[os.path.splitext(os.path.basename(info.absolute_path))[0]] = (info.caption, processed)
    found = {f.code: {os.path.splitext(os.path.basename(n))[0] for n in f.names} for f in ours(config, real).findings}
    marked = {name for name, (_, texts) in trained.items() if any("\ufeff" in one for one in texts)}
    assert found.get("caption-mark", set()) == marked
    assert marked
    lost = {
        name for name, caption in files.items()
        if not wildcards and sum(bool(line.strip()) for line in caption.splitlines()[1:])
    }  # fmt: skip
    for name, (_, texts) in trained.items() if not wildcards else ():
        rest = [line.strip() for line in files[name].splitlines()[1:] if line.strip()]
        assert (name in lost) == bool(rest)
        assert texts == [files[name].splitlines()[0].strip()]
    assert found.get("caption-lines", set()) == lost
    cached = ours(config, real, {"cache_text_encoder_outputs": True})
    raw = {name for name, (caption, texts) in trained.items() if wildcards and set(texts) != {caption}}
    named = {
        os.path.splitext(os.path.basename(n))[0]
        for f in cached.findings
        if f.code == "cached-captions"
        for n in f.names
    }
    assert named >= raw  # a line may be drawn that is the whole caption
    assert named <= {name for name, caption in files.items() if re.search(r"[{}\r\n]", caption)}
    assert bool(named) == wildcards


def test_captions_are_cached_as_they_stand(there: Path, real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = importlib.import_module("library.strategy_base")
    picture("a", "a {red|blue} cat;;;x\nsecond")
    config = config_of(
        enable_wildcard=True, caption_prefix="p", secondary_separator=";;;", caption_dropout_every_n_epochs=1
    )
    group, _ = theirs(config, real)
    seen: list[str] = []
    caching = SimpleNamespace(
        batch_size=1,
        cache_to_disk=False,
        cache_batch_outputs=lambda _t, _m, _e, batch: seen.extend(i.caption for i in batch),
    )
    for name in ("TokenizeStrategy", "TextEncodingStrategy"):
        monkeypatch.setattr(getattr(strategies, name), "get_strategy", classmethod(lambda _: None))
    monkeypatch.setattr(strategies.TextEncoderOutputsCachingStrategy, "get_strategy", classmethod(lambda _: caching))
    accelerator = SimpleNamespace(num_processes=1, process_index=0, wait_for_everyone=lambda: None)
    group.new_cache_text_encoder_outputs([], accelerator)
    assert seen == ["a {red|blue} cat;;;x\nsecond"]
    found = [
        f for f in ours(config, real, {"cache_text_encoder_outputs": True}).findings if f.code == "cached-captions"
    ]
    assert [f.message.partition(" ")[0] for f in found] == ["enable_wildcard", "caption_prefix"]
    assert found[1].names == ("caption_prefix", "secondary_separator", "caption_dropout_every_n_epochs")


@pytest.mark.parametrize("share", [0.07, 0.1, 0.5, 0.25, 0.9])
def test_images_in_both_parts(there: Path, real: SimpleNamespace, share: float) -> None:
    for i in range(41):
        picture(f"{i:02}")
    config = config_of(dataset={"validation_split": share, "validation_seed": 3})
    train, held = theirs(config, real)
    both = set(train.datasets[0].image_data) & set(held.datasets[0].image_data)
    found = [f for f in ours(config, real).findings if f.code == "validation-overlap"]
    assert {name for f in found for name in f.names} == both
