"""Options that do not count beside another one are refused, not passed over in silence."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.errors import KohyaBucketError


@pytest.fixture
def config(tmp_path: Path, folder: Path) -> str:
    table = "[[datasets]]\nresolution = 512\nenable_bucket = true\n[[datasets.subsets]]\n"
    text = f"{table}image_dir = '{folder}'\n"
    (tmp_path / "c.toml").write_text(text, encoding="utf-8")
    return str(tmp_path / "c.toml")


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("simulate 576x768 --config", "--resolution 1024"),
        ("simulate 576x768 --config", "--bucket-no-upscale"),
        ("simulate 576x768 --config", "--rule exact"),
        ("simulate 576x768 --config", "--min-bucket-reso 256"),  # its default, but asked for
        ("analyze --config", "--resolution 1024"),
        ("analyze --config", "--bucket-reso-steps 32"),
        ("analyze --config", "--preset sdxl"),
        ("plan", "--in-json meta.json"),
        ("plan", "--reg-data-dir reg"),
        ("plan", "--train-data-dir img"),
    ],
)
def test_what_a_config_overrules(config: str, command: str, options: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), config, *options.split()])
    assert isinstance(result.exception, KohyaBucketError)
    assert f"leave out {options.split()[0]}" in str(result.exception)
    assert CliRunner().invoke(app, [*command.split(), config]).exit_code == 0


def test_a_release_that_is_none(config: str) -> None:
    result = CliRunner().invoke(app, ["plan", config, "--sd-scripts", "o.9"])
    assert "--sd-scripts is 'o.9'" in str(result.exception)
    for version in ("0.10.1", "v0.11.1", "0.10", "main"):
        assert CliRunner().invoke(app, ["plan", config, "--sd-scripts", version]).exit_code == 0


def test_regularization_beside_metadata_is_named(config: str) -> None:
    folder = str(Path(config).parent / "data")
    options = ["--in-json", "meta.json", "--reg-data-dir", folder]
    result = CliRunner().invoke(app, ["plan", "--train-data-dir", folder, *options])
    assert "is ignored with --in_json" in result.output


def test_a_config_of_which_nothing_can_be_trained_is_an_error(config: str, folder: Path) -> None:
    assert CliRunner().invoke(app, ["plan", config]).exit_code == 0
    for image in folder.iterdir():
        image.write_bytes(b"no image")
    result = CliRunner().invoke(app, ["plan", config])
    assert result.exit_code == 1
    assert "stops: no image can be trained" in result.output


@pytest.mark.parametrize(
    ("options", "ranks", "words"),
    [
        ("--concurrency 2", "1", "--concurrency says how many encoders Ray starts: add --engine ray, or leave it out"),
        ("--engine ray --format npz", "1", "--engine ray writes shards: leave out --format npz"),
        ("--engine ray", "2", "start the command once, without torchrun"),
        ("--engine spark", "1", "--engine is 'spark'"),
    ],
)
def test_engines(monkeypatch: pytest.MonkeyPatch, folder: Path, options: str, ranks: str, words: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    command = ["precompute", str(folder), "--vae", "x", "--resolution", "512", "-o", "out", *options.split()]
    assert words in str(CliRunner().invoke(app, command).exception)
