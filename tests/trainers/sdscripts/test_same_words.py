"""What doctor calls a stop, a training ends with in the same words."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.sampler import PlanSampler
from kohya_bucket.trainers.sdscripts.door import DOOR
from kohya_bucket.trainers.sdscripts.seams import _prepare_accelerator
from tests.command_line import command_line
from tests.pictures import make_pictures

__all__ = ["command_line"]


def stops_of(command_line: Any, config: Path) -> list[str]:
    """The messages, with what to do, that doctor and plan alike have of what stops a training."""
    found = []
    for command in ("doctor", "plan"):
        code, out, _ = command_line(command, config, "--json")
        assert code == 1
        said = json.loads(out)
        findings = [one for part in said.get("sections", [said]) for one in part["findings"]]
        errors = [one for one in findings if one["severity"] == "error"]
        found.append([": ".join(filter(None, (one["message"], one["remedy"]))) for one in errors])
    assert found[0] == found[1]
    return found[0]


def test_a_training_without_a_batch(tmp_path: Path, command_line: Any, capfd: pytest.CaptureFixture[str]) -> None:
    make_pictures(tmp_path / "data", [(256, 256)], "a caption")
    config = tmp_path / "c.toml"
    config.write_text(
        "[kohya_bucket]\nremainder = 'drop'\nsmall_buckets = 'drop'\n"
        "[[datasets]]\nresolution = 256\nbatch_size = 2\nenable_bucket = true\nmin_bucket_reso = 128\n"
        f"[[datasets.subsets]]\nimage_dir = '{(tmp_path / 'data').as_posix()}'\ncaption_extension = '.txt'\n",
        encoding="utf-8",
    )
    (said,) = stops_of(command_line, config)
    from kohya_bucket.trainers.door.group import GroupPlanner
    from kohya_bucket.trainers.sdscripts.config import read_config
    from kohya_bucket.trainers.sdscripts.plan import overview

    read = read_config(config)
    options = AdapterOptions(remainder="drop", small_buckets="drop")
    items = [one.items for one in overview(read, options, (1,)).datasets]
    with pytest.raises(SystemExit):
        PlanSampler(GroupPlanner(items, options), 0, SimpleNamespace(value=1))
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [{"persistent_data_loader_workers": True, "max_data_loader_n_workers": 0}, {"max_data_loader_n_workers": -1}],
)
def test_loader_settings(tmp_path: Path, command_line: Any, settings: dict[str, Any]) -> None:
    make_pictures(tmp_path / "data" / "1_x", [(256, 256)] * 2, "a caption")
    run_file = tmp_path / "run.toml"
    lines = {"train_data_dir": (tmp_path / "data").as_posix(), "resolution": "256", "caption_extension": ".txt"}
    run_file.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in (lines | settings).items()), encoding="utf-8")
    (said,) = stops_of(command_line, run_file)
    with pytest.raises(ConfigError) as raised:
        _prepare_accelerator(SimpleNamespace(), SimpleNamespace(**settings))  # type: ignore[arg-type]
    assert str(raised.value) == said


@pytest.mark.parametrize(
    "options",
    [
        {"remainder": "pda"}, {"ordr": "runs"}, {"order": "local"}, {"max_pixels": 0}, {"model": "wan"},
        {"latent_cache_dir": "x"}, {"resolutions": [512, 512]}, {"max_crop": 2}, {"largest_first": 3},
        {"resolutions": [512, 768], "resolution_weights": [1]},
        {"order": "local", "latent_cache": "shards", "open_shards": 1},
    ],
    ids=str,
)  # fmt: skip
def test_options(tmp_path: Path, command_line: Any, capfd: pytest.CaptureFixture[str], options: dict[str, Any]) -> None:
    make_pictures(tmp_path / "data", [(256, 256)] * 2, "a caption")
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
    config = tmp_path / "c.toml"
    config.write_text(
        f"[kohya_bucket]\n{table}[[datasets]]\nresolution = 256\n"
        f"[[datasets.subsets]]\nimage_dir = '{(tmp_path / 'data').as_posix()}'\ncaption_extension = '.txt'\n",
        encoding="utf-8",
    )
    said = stops_of(command_line, config)
    capfd.readouterr()
    with pytest.raises(SystemExit):
        DOOR.read_options({"kohya_bucket": options}, SimpleNamespace(f_locals={}))  # type: ignore[arg-type]
    assert said
    assert capfd.readouterr().err == f"kohya_bucket: {'; '.join(f'dataset config: {one}' for one in said)}\n"
