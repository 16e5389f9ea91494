"""Configs read by this package and by the real sd-scripts: refusals, resolved values, images, repeats, one by one."""

import argparse
import json
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toml

from compat_tests.config_playground import make_playground, random_config
from compat_tests.hand_made_configs import HAND_MADE, SUBSET, one
from kohya_bucket.errors import BucketSettingsError, ConfigError
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.config import (
    NEWEST,
    Config,
    DatasetKind,
    Feature,
    ReadDataset,
    Release,
    Severity,
    read_config,
    read_folders,
)  # fmt: skip
from kohya_bucket.trainers.sdscripts.config.keys import Level, known_keys
from kohya_bucket.trainers.sdscripts.dataset_images import DatasetTable
from kohya_bucket.trainers.sdscripts.make_buckets import bucket_info
from kohya_bucket.trainers.sdscripts.plan import overview

# Codes of the findings for which sd-scripts refuses the whole config.
REFUSALS = {"unknown-key", "misplaced-key", "wrong-type", "missing-key", "mixed-kinds", "not-a-table"}
PLACED: list[int] = []
SKIPPED: list[int] = []
FULL = (True, True, True, True)


@pytest.fixture(scope="module")
def real(unpatched: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """sd-scripts, what this package takes it for, and its own command line defaults."""
    import importlib

    release = Release.in_checkout(unpatched.root)
    names = {f.name for f in fields(unpatched.config_util.BaseDatasetParams)}
    assert (Feature.SKIPPING in release) == ("skip_image_resolution" in names)
    parser = argparse.ArgumentParser()
    unpatched.train_util.add_dataset_arguments(parser, True, True, True)
    unpatched.train_util.add_training_arguments(parser, True)
    parser.add_argument("--validation_seed", type=int, default=None)
    parser.add_argument("--validation_split", type=float, default=0.0)
    base = importlib.import_module("library.strategy_base").LatentsCachingStrategy
    before, base._strategy = (
        base._strategy,
        importlib.import_module("library.strategy_sd").SdSdxlLatentsCachingStrategy(True, False, 1, False),
    )
    logging.disable(logging.CRITICAL)
    yield SimpleNamespace(**vars(unpatched), release=release, parser=parser)
    logging.disable(logging.NOTSET)
    base._strategy = before


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("playground")
    make_playground(root)
    return root


@pytest.fixture
def there(playground: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In the playground; caches that sd-scripts writes there are taken away again."""
    monkeypatch.chdir(playground)
    kept = set(playground.glob("*/metadata_cache.json"))
    yield playground
    for cache in set(playground.glob("*/metadata_cache.json")) - kept:
        cache.unlink()


def arguments(real: SimpleNamespace, *given: str) -> argparse.Namespace:
    args = real.parser.parse_args(list(given))
    real.train_util.prepare_dataset_args(args, True)
    return args


def blueprint(
    real: SimpleNamespace, config: dict[str, Any], args: argparse.Namespace, flags: tuple[bool, ...] = FULL
) -> Any:
    sanitizer = real.config_util.ConfigSanitizer(*flags)
    return real.config_util.BlueprintGenerator(sanitizer).generate(config, args)


def refused(real: SimpleNamespace, config: dict[str, Any]) -> bool:
    import voluptuous

    try:
        real.config_util.ConfigSanitizer(*FULL).sanitize_user_config(config)
    except (voluptuous.Invalid, AttributeError, TypeError):
        return True
    return False


def write(config: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def ours(config: dict[str, Any], folder: Path, real: SimpleNamespace, **given: Any) -> Config:
    return read_config(write(config, folder / "config.json"), given, release=real.release)


def assert_same_values(config: Config, theirs: Any) -> None:
    for mine, other in zip(config.datasets, theirs.dataset_group.datasets, strict=True):
        for name, value in asdict(other.params).items():
            if name in ("tokenizer", "max_token_length"):
                continue
            assert getattr(mine.config, name) == value, name
        for subset, blue in zip(mine.config.subsets, other.subsets, strict=True):
            for name, value in asdict(blue.params).items():
                if name in ("validation_split", "validation_seed"):
                    continue
                if name == "caption_extension" and value and not value.startswith("."):
                    value = "." + value
                if name == "custom_attributes" and value is None:
                    value = {}
                assert getattr(subset, name) == value, name


def as_rows(images: DatasetTable) -> list[tuple[Any, ...]]:
    conditioning = images.conditioning or ("",) * len(images)
    rows = zip(images.keys, images.paths, images.repeats.tolist(), images.is_reg.tolist(), conditioning, strict=True)
    return list(rows)


def their_rows(dataset: Any) -> list[tuple[Any, ...]]:
    return [
        (key, info.absolute_path, info.num_repeats, info.is_reg, info.cond_img_path or "")
        for key, info in dataset.image_data.items()
    ]


def assert_same_images(images: DatasetTable, dataset: Any, seeded: bool) -> None:
    if not seeded:
        assert len(images) == len(dataset.image_data)
        return
    assert as_rows(images) == their_rows(dataset)
    for stated, info in zip(images.stated_sizes.tolist(), dataset.image_data.values(), strict=True):
        if stated[0]:
            assert tuple(info.image_size) == tuple(stated)


def assert_same_captions(dataset: ReadDataset, other: Any) -> None:
    captions = dataset.images.captions or (None,) * len(dataset.images)
    for key, caption in zip(dataset.images.keys, captions, strict=True):
        assert (caption or "") == (other.image_data[key].caption or "")


def assert_same_plan(mine: Config, others: Any) -> None:
    """What `kohya-bucket plan` shows is what sd-scripts' own make_buckets made of it."""
    try:
        seen = overview(mine, AdapterOptions())
    except BucketSettingsError:
        # sd-scripts builds a dataset without images even where its settings could place none.
        assert not any(len(d.image_data) for d in others)
        return
    planned = {dataset.read.config.number: dataset for dataset in seen.datasets}
    for read, other in zip(mine.datasets, others, strict=True):
        dataset = planned.get(read.config.number)
        if dataset is None:  # `plan` names it instead, with its mistake
            assert mine.findings.of(Severity.ERROR)
            continue
        split = dataset.read.config.validation_split > 0 and dataset.read.config.validation_seed is None
        if split or dataset.left_out:
            continue
        other = getattr(other, "dreambooth_dataset_delegate", other)
        infos = other.image_data.values()
        placement = dataset.items.placement
        assert placement.bucket_sizes.tolist() == [list(i.bucket_reso) for i in infos]
        assert placement.resized_sizes.tolist() == [list(i.resized_size) for i in infos]
        assert sum(row.batches for row in dataset.rows) == len(other.buckets_indices)
        if other.enable_bucket and dataset.items.keys:
            assert bucket_info(dataset.items) == other.bucket_info
        PLACED.append(len(infos))


def compare(config: dict[str, Any], folder: Path, real: SimpleNamespace, *given: str) -> str:
    """Read with both; what sd-scripts did: "refused", "stopped" or "built"."""
    mine = ours(config, folder, real)
    codes = [f.code for f in mine.findings.of(Severity.ERROR)]
    is_refused = refused(real, config)
    assert bool(REFUSALS & set(codes)) == is_refused, codes
    if is_refused:
        return "refused"
    theirs = blueprint(real, config, arguments(real, *given))
    assert_same_values(mine, theirs)
    built = stop = None
    try:
        built = real.config_util.generate_dataset_group_by_blueprint(theirs.dataset_group)
    except Exception as error:
        stop = error
    if stop is not None:
        assert codes, f"sd-scripts stops with {type(stop).__name__}: {stop}, and nothing was said before"
        return "stopped"
    train, validation = built if isinstance(built, tuple) else (built, None)
    for dataset, other in zip(mine.datasets, train.datasets, strict=True):
        split = dataset.config.validation_split > 0 and dataset.config.validation_seed is None
        assert_same_images(dataset.images, other, seeded=not split)
        SKIPPED.append(len(dataset.images.skipped))
        if not split:
            assert_same_captions(dataset, other)
    assert_same_plan(mine, train.datasets)
    held_back = [d for d in mine.datasets if d.validation is not None]
    assert len(held_back) == (len(validation.datasets) if validation is not None else 0)
    for dataset, other in zip(held_back, validation.datasets if validation is not None else [], strict=True):
        assert_same_images(dataset.validation, other, seeded=dataset.config.validation_seed is not None)
    return "built"


def compare_all(configs: list[dict[str, Any]], folder: Path, real: SimpleNamespace) -> dict[str, int]:
    """How many configs were refused, stopped or built; caches that sd-scripts writes are taken away after each."""
    outcomes = {"built": 0, "stopped": 0, "refused": 0}
    for number, config in enumerate(configs):
        print(number, json.dumps(config))
        outcomes[compare(config, folder, real)] += 1
        for cache in folder.glob("*/metadata_cache.json"):
            if cache.parent.name not in ("cached", "broken_cache"):
                cache.unlink()
    return outcomes


def skip_where_unknown(real: SimpleNamespace) -> None:
    if Feature.SKIPPING not in real.release:
        pytest.skip("this sd-scripts does not know skip_image_resolution")


def test_two_hundred_configs_name_the_same_images(there: Path, real: SimpleNamespace) -> None:
    outcomes = compare_all([random_config(seed, real.release, slips=False) for seed in range(200)], there, real)
    print(f"{real.root.name}: {outcomes}; {sum(PLACED)} images in {len(PLACED)} datasets placed alike")
    assert sum(PLACED) > 500
    assert outcomes["built"] > 60
    assert outcomes["refused"] == 0


def test_the_same_images_are_skipped(there: Path, real: SimpleNamespace) -> None:
    skip_where_unknown(real)
    configs = []
    for seed in range(40_000, 40_080):
        config, rng = random_config(seed, real.release, slips=False), random.Random(seed)
        for table in rng.choice([[config.setdefault("general", {})], config["datasets"]]):
            table["skip_image_resolution"] = rng.choice([64, [100, 60], 75, [128, 100]])
        configs.append(config)
    SKIPPED.clear()
    outcomes = compare_all(configs, there, real)
    print(f"{outcomes}; {sum(SKIPPED)} images skipped, in {sum(map(bool, SKIPPED))} of {len(SKIPPED)} datasets")
    assert sum(map(bool, SKIPPED)) > 40


def test_the_keys_are_those_of_the_schemas(real: SimpleNamespace) -> None:
    schemas = real.config_util.ConfigSanitizer(*FULL)
    version = Release.from_version(real.root.name) if real.root.name.startswith("v") else NEWEST
    assert real.release.schema is not None
    assert version.is_known
    for release in (real.release, version):
        assert set(map(str, schemas.general_schema)) == known_keys(Level.GENERAL, None, release)
    for kind, short in (
        (DatasetKind.DREAMBOOTH, "db"),
        (DatasetKind.FINE_TUNING, "ft"),
        (DatasetKind.CONTROLNET, "cn"),
    ):
        for level, name in ((Level.SUBSET, "subset"), (Level.DATASET, "dataset")):
            theirs = set(map(str, getattr(schemas, f"{short}_{name}_schema"))) - {"subsets"}
            assert theirs == known_keys(level, kind, real.release) == known_keys(level, kind, version)


def test_the_same_configs_are_refused(there: Path, real: SimpleNamespace) -> None:
    refusals = 0
    for seed in range(300):
        config = random_config(10_000 + seed, NEWEST if seed % 3 else Release.from_version("0.10.1"), slips=True)
        mine = {f.code for f in ours(config, there, real).findings}
        expected = refused(real, config)
        refusals += expected
        assert bool(REFUSALS & mine) == expected, (json.dumps(config), sorted(mine))
    assert refusals > 40


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_configs(name: str, there: Path, real: SimpleNamespace) -> None:
    if name == "no datasets":
        with pytest.raises(ConfigError, match=r"\[\[datasets\]\]"):
            ours(HAND_MADE[name], there, real)
        return
    outcome = compare(HAND_MADE[name], there, real)
    if name in ("less regularization", "folder twice", "two resolutions", "false below true"):
        assert outcome == "built"


@pytest.mark.parametrize("name", [name for name in HAND_MADE if "skipped" in name and "split" not in name])
def test_as_many_images_are_skipped_as_sd_scripts_logs(
    name: str, there: Path, real: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    skip_where_unknown(real)
    mine = ours(HAND_MADE[name], there, real)
    theirs = blueprint(real, HAND_MADE[name], arguments(real))
    logging.disable(logging.NOTSET)
    try:
        with caplog.at_level(logging.INFO):
            real.config_util.generate_dataset_group_by_blueprint(theirs.dataset_group)
    finally:
        logging.disable(logging.CRITICAL)
    counts = [int(text.split()[1]) for text in caplog.messages if text.startswith("filtered ")]
    assert sum(counts) == sum(len(dataset.images.skipped) for dataset in mine.datasets)
    assert counts or name == "nothing skipped"


def test_the_command_line_counts_where_the_config_is_silent(there: Path, real: SimpleNamespace) -> None:
    given = ["--train_batch_size", "3", "--resolution", "128,64", "--enable_bucket", "--min_bucket_reso", "64",
             "--caption_extension", "txt", "--keep_tokens", "2", "--prior_loss_weight", "0.5", "--flip_aug",
             "--dataset_repeats", "4", "--bucket_reso_steps", "32", "--face_crop_aug_range", "1.5,2.5"]  # fmt: skip
    given += ["--skip_image_resolution", "70,80"] if Feature.SKIPPING in real.release else []
    for seed in range(60):
        config = random_config(20_000 + seed, real.release, slips=False)
        for table in config["datasets"]:
            table.pop("resolution")
        args = arguments(real, *given)
        mine = ours(config, there, real, **vars(args))
        assert not {f.code for f in mine.findings} & REFUSALS
        assert_same_values(mine, blueprint(real, config, args))


def test_folders_with_repeats(there: Path, real: SimpleNamespace, tmp_path: Path) -> None:
    for folder, names in {"train": ["5_cat", "10_black dog_x", "x_y", "0_no", "7"], "reg": ["1_thing", "2_"]}.items():
        for i, name in enumerate(names):
            os.symlink(there / ("txt" if i % 2 else "plain"), _made(tmp_path / folder) / name)
    train, reg = str(tmp_path / "train"), str(tmp_path / "reg")
    args = arguments(
        real, "--resolution", "128", "--enable_bucket", "--train_batch_size", "2", "--min_bucket_reso", "64"
    )
    subsets = real.config_util.generate_dreambooth_subsets_config_by_subdirs(train, reg)
    theirs = blueprint(real, {"datasets": [{"subsets": subsets}]}, args, (True, True, False, True))
    mine = read_folders(train, reg, vars(args), release=real.release)
    assert_same_values(mine, theirs)
    built = real.config_util.generate_dataset_group_by_blueprint(theirs.dataset_group)
    group = built[0] if isinstance(built, tuple) else built
    assert as_rows(mine.datasets[0].images) == their_rows(group.datasets[0])
    assert len(mine.datasets[0].config.subsets) == 5


def _made(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def test_toml_files_are_read_alike(there: Path, real: SimpleNamespace) -> None:
    for seed in range(40):
        config = random_config(30_000 + seed, real.release, slips=False)
        path = there / "config.toml"
        path.write_text(toml.dumps(config), encoding="utf-8")
        loaded = real.config_util.load_user_config(str(path))
        mine = read_config(path, release=real.release)
        assert_same_values(mine, blueprint(real, loaded, arguments(real)))


def test_the_ready_configs_are_accepted(real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    paths = sorted((root / "configs").glob("*.toml"))
    assert len(paths) >= 7
    for path in paths:
        config = real.config_util.load_user_config(str(path))
        config.pop("kohya_bucket", None)
        theirs = blueprint(real, config, arguments(real), (True, True, False, True))
        mine = read_config(path, release=real.release)
        assert not {f.code for f in mine.findings} & REFUSALS
        assert_same_values(mine, theirs)


def test_validation_does_not_touch_the_global_random_state(there: Path, real: SimpleNamespace) -> None:
    state = random.getstate()
    ours(one(SUBSET, validation_split=0.5), there, real)
    assert random.getstate() == state
