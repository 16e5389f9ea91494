"""What commands say of an epoch is the plan that would run: bucket table, JSON, lines on GPUs, findings."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import toml
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.errors import PlanError
from kohya_bucket.trainers.door import group, subject
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.sdscripts.config import read_config

pytest.importorskip("torch", reason="trainers' loaders are torch's")
from kohya_bucket.trainers.door.sampler import PlanSampler
from tests.pictures import png_header

BUDGETS: list[dict[str, Any]] = [{}, {"max_pixels": 4 * 512 * 512}, {"model": "flux", "max_tokens": 5000}]
REMAINDERS: list[dict[str, Any]] = [
    {},
    {"remainder": "pad"},
    {"remainder": "drop"},
    {"remainder": "drop", "small_buckets": "drop"},
    {"remainder": "merge", "merge_max_crop": 0.5},
    {"remainder": "catch_all"},
]
RESOLUTIONS: list[dict[str, Any]] = [
    {},
    {"resolutions": [256, 512]},
    {"resolutions": [256, 384, 512], "resolution_mode": "rotate"},
    {"resolutions": [256, 512], "resolution_mode": "weighted", "resolution_weights": [3, 1]},
]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stdout


class Case:
    """Random datasets and options, and the batches that a trainer's loader is given for them in an epoch."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = np.random.default_rng(seed)
        datasets = []
        for number in range(1 + seed % 2):
            images = folder / f"data{number}"
            images.mkdir()
            sizes = np.exp(rng.uniform(np.log(300), np.log(1500), (int(rng.integers(5, 30)), 2))).astype(int)
            for i, (width, height) in enumerate(sizes.tolist()):
                (images / f"{number}_{i}.png").write_bytes(png_header(width, height))
            subset = {"image_dir": str(images), "num_repeats": int(rng.integers(1, 4)), "class_tokens": "x"}
            datasets.append({"batch_size": int(rng.integers(1, 6)), "subsets": [subset]})
        while True:
            table = {**BUDGETS[rng.integers(3)], **REMAINDERS[rng.integers(6)], **RESOLUTIONS[rng.integers(4)]}
            config = {
                "general": {"enable_bucket": True, "resolution": 512},
                "datasets": datasets,
                "kohya_bucket": {**table, "step_shapes": ["one", "equal_cost"][rng.integers(2)]},
            }
            self.path = folder / "config.toml"
            self.path.write_text(toml.dumps(config), encoding="utf-8")
            read = read_config(self.path)
            self.options = options = read.options
            assert options is not None
            self.images = [
                d.images.place(d.images.sizes(), d.config.batch_size, d.config.dataset_keys, options).trained
                for d in read.datasets
            ]
            try:
                sampler = PlanSampler(GroupPlanner(self.images, options), 7, SimpleNamespace(value=1))
                break
            except PlanError:  # of these options an epoch would be empty, which is refused
                continue
        self.samples: Counter[tuple[int, int, tuple[int, int]]] = Counter()
        self.batches = self.samples.copy()
        for batch in sampler:
            of = self.images[batch.dataset]
            key = batch.dataset, int(of.resolution_of_bucket[batch.bucket]), of.buckets[batch.bucket]
            self.batches[key] += 1
            self.samples[key] += len(batch.images)

    def of(self, counts: Counter[Any], dataset: int, resolution: int | None = None) -> dict[tuple[int, int], int]:
        """What a dataset trains in each size, of one resolution or of all."""
        out: Counter[tuple[int, int]] = Counter()
        for (number, at, size), count in counts.items():
            if number == dataset and resolution in (None, at):
                out[size] += count
        return dict(out)


def shown(rows: list[dict[str, Any]], key: str) -> dict[tuple[int, int], int]:
    out: Counter[tuple[int, int]] = Counter()
    for row in rows:
        out[tuple(row["bucket"]) if "bucket" in row else (row["width"], row["height"])] += row[key]
    return {size: count for size, count in out.items() if count}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_what_commands_show_is_what_a_loader_is_given(seed: int, tmp_path: Path) -> None:
    case = Case(seed, tmp_path)
    plan = json.loads(run("plan", case.path, "--json", "--gpus", "1,2,3"))
    for number, data in enumerate(plan["datasets"]):
        for what, counts in (("samples", case.samples), ("batches", case.batches)):
            assert shown(data["buckets"], what) == case.of(counts, number)
            assert data[what] == sum(case.of(counts, number).values())
    one = plan["gpus"][0]
    assert (one["steps"], one["samples"]) == (case.batches.total(), case.samples.total())

    for row in plan["gpus"][1:]:
        epoch = GroupPlanner(case.images, case.options).planner(row["gpus"]).plan(7, 1)
        assert (row["steps"], row["samples"]) == (epoch.steps, epoch.samples)

    sections = json.loads(run("doctor", case.path, "--json", "--quick"))["sections"]
    (facts,) = (section["facts"] for section in sections if section["title"].startswith("config "))
    said = [fact["text"] for fact in facts if fact["name"].startswith("dataset")]
    for number, text in enumerate(said):
        batches = sum(case.of(case.batches, number).values())
        assert f", {batches:,} batch" in text

    report = json.loads(run("analyze", "--config", case.path, "--json"))
    subjects = iter(report["datasets"])
    for number in range(len(case.images)):
        for resolution in range(len(case.options.resolutions or (0,))):
            data = next(subjects)
            for what, counts in (("samples", case.samples), ("batches", case.batches)):
                mine = case.of(counts, number, resolution)
                assert shown(data["buckets"], what) == mine
                assert data["summary"][what] == sum(mine.values())
    assert next(subjects, None) is None


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_batches_that_are_not_full_are_named_by_their_share(seed: int, tmp_path: Path) -> None:
    case = Case(seed, tmp_path)
    plan = json.loads(run("plan", case.path, "--json", "--images"))
    config = toml.loads(case.path.read_text(encoding="utf-8"))
    config["kohya_bucket"] |= {"remainder": "merge"}
    config["kohya_bucket"].pop("small_buckets", None)
    (tmp_path / "merged.toml").write_text(toml.dumps(config), encoding="utf-8")
    merged = json.loads(run("plan", tmp_path / "merged.toml", "--json"))["datasets"]
    for number, (data, other) in enumerate(zip(plan["datasets"], merged, strict=True), 1):
        short = sum(row["short_batches"] for row in data["buckets"])
        found = [
            one for one in plan["findings"] if one["code"] == "short-batches" and f"dataset {number}" in one["where"]
        ]
        assert len(found) == (short >= 2 and short - 1 >= 0.1 * data["batches"])
        for one in found:
            assert one["severity"] == ("warning" if short - 1 >= 0.25 * data["batches"] else "note")
            assert one["message"].startswith(f"{short:,} of {data['batches']:,} batches are not full (")
            unfilled = {tuple(row["bucket"]) for row in data["buckets"] if row["short_batches"] == row["batches"]}
            at = [f"{row['key']}: {'x'.join(map(str, row['bucket']))}" for row in data["image_rows"]
                  if tuple(row["bucket"]) in unfilled]  # fmt: skip
            if not case.options.resolutions:  # else two resolutions may have one bucket, full at one of them
                assert sorted(one["names"]) == sorted(at)
            if case.options.remainder != "merge":
                left = sum(row["short_batches"] for row in other["buckets"])
                assert f'"merge" leaves {left:,}, with' in one["remedy"]
            assert '"pad" fills them' in one["remedy"]


def test_what_is_planned_for_analyze_grows_with_the_images_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(png_header(600, 400))
    dataset = {"batch_size": 2, "subsets": [{"image_dir": str(tmp_path / "data"), "num_repeats": 5}]}
    planned: list[int] = []

    def epoch_of(datasets: Any, *others: Any) -> Any:
        planned.append(len(datasets))
        return group.epoch_of(datasets, *others)

    monkeypatch.setattr(subject, "epoch_of", epoch_of)
    for table, most in (({}, 1), ({"resolutions": [256, 512], "resolution_mode": "rotate"}, 5)):
        config = {"general": {"enable_bucket": True, "resolution": 512}, "datasets": [dataset] * 5}
        (tmp_path / "config.json").write_text(json.dumps({**config, "kohya_bucket": table}), encoding="utf-8")
        planned.clear()
        run("analyze", "--config", tmp_path / "config.json", "--json")
        assert set(planned) == {most}


@pytest.mark.parametrize("trainer", ["ai-toolkit", "musubi-tuner"])
def test_data_sets_that_are_trained_one_after_another(trainer: str, tmp_path: Path) -> None:
    """The one with fewer images has smaller batches, so that its epochs have as many steps."""
    rng = np.random.default_rng(3)
    for number, count in enumerate((37, 15)):
        images = tmp_path / f"data{number}"
        images.mkdir()
        for i, (width, height) in enumerate(rng.integers(200, 600, (count, 2)).tolist()):
            (images / f"{number}_{i}.png").write_bytes(png_header(width, height))
            (images / f"{number}_{i}.txt").write_text("a caption", encoding="utf-8")
    table = {"resolution_mode": "schedule", "resolution_epochs": [1]}
    sides = {"data0": 128, "data1": 256}
    path, arguments = tmp_path / "config.toml", ["--arch", "zi", "--json"]
    if trainer == "ai-toolkit":
        pytest.importorskip("yaml")
        path, arguments = tmp_path / "job.yaml", ["--json"]
        datasets = [{"folder_path": str(tmp_path / name), "resolution": side} for name, side in sides.items()]
        process = {"type": "sd_trainer", "datasets": datasets, "train": {"batch_size": 4, "steps": 100}}
        job = {"job": "extension", "config": {"name": "x", "process": [process]}, "kohya_bucket": table}
        path.write_text(json.dumps(job), encoding="utf-8")  # JSON is YAML
    else:
        general = {"caption_extension": ".txt", "enable_bucket": True, "batch_size": 4}
        datasets = [
            {"image_directory": str(tmp_path / name), "cache_directory": str(tmp_path / f"{name} cache"),
             "resolution": [side, side]} for name, side in sides.items()
        ]  # fmt: skip
        path.write_text(toml.dumps({"general": general, "datasets": datasets, "kohya_bucket": table}), encoding="utf-8")
    planned = json.loads(run("plan", path, *arguments))["datasets"]
    analysed = json.loads(run("analyze", "--config", path, *arguments))["datasets"]
    steps = [sum(row["batches"] for row in data["buckets"]) for data in planned]
    assert steps == [data["summary"]["batches"] for data in analysed]
    assert steps[0] == steps[1] > 4
    for data, report in zip(planned, analysed, strict=True):
        rows = [row | {"bucket": row["bucket"][:2]} for row in data["buckets"]]
        for what in ("samples", "batches"):
            assert shown(rows, what) == shown(report["buckets"], what)


@pytest.mark.parametrize(
    "keys", [{}, {"no_resize_control": True}, {"control_resolution": [256, 256]}], ids=lambda keys: "".join(keys)
)
def test_batches_hold_as_many_control_images_of_equal_sizes(keys: dict[str, Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(len(keys))

    def picture(name: str) -> str:
        (tmp_path / name).write_bytes(png_header(*rng.choice([256, 512, 640], 2).tolist()))
        return str(tmp_path / name)

    lines = []
    for i in range(40):
        controls = {f"control_path_{k}": picture(f"{i}_{k}.png") for k in range(rng.integers(3))}
        lines.append(json.dumps({"image_path": picture(f"{i}.png"), "caption": "x", **controls}))
    (tmp_path / "list.jsonl").write_text("\n".join(lines), encoding="utf-8")
    dataset = {"image_jsonl_file": str(tmp_path / "list.jsonl"), "cache_directory": str(tmp_path / "c"), **keys}
    dataset |= {"resolution": [512, 512], "enable_bucket": True, "batch_size": 4, "num_repeats": 3}
    path = tmp_path / "config.toml"
    path.write_text(toml.dumps({"datasets": [dataset]}), encoding="utf-8")
    (planned,) = json.loads(run("plan", path, "--arch", "qie", "--json"))["datasets"]
    (analysed,) = json.loads(run("analyze", "--config", path, "--arch", "qie", "--json"))["datasets"]
    rows = [row | {"bucket": row["bucket"][:2]} for row in planned["buckets"]]
    assert len(rows) > len(shown(rows, "items"))
    for what in ("samples", "batches", "short_batches"):
        assert shown(rows, what) == shown(analysed["buckets"], what)


def test_a_folder_of_images_is_no_clip(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(png_header(640, 480))
    result = CliRunner().invoke(app, ["simulate", str(tmp_path)])
    assert "is a folder" in str(result.exception)
    assert f"`kohya-bucket analyze {tmp_path}`" in str(result.exception)
