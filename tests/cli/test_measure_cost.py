"""`kohya-bucket measure-cost`: on a model that is small enough to time on a CPU, whatever else runs there."""

import json

import pytest
import toml
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.token_grids import TOKEN_GRIDS, TokenGrid
from kohya_bucket.trainers.door.options import AdapterOptions


def run(*arguments):
    return CliRunner().invoke(app, ["measure-cost", *arguments])


@pytest.fixture
def small(monkeypatch):
    pytest.importorskip("torch", reason="steps are torch's")
    monkeypatch.setitem(TOKEN_GRIDS, "small", TokenGrid(128, 2, frame_stride=4))


def test_what_it_prints_is_a_config_table(small):
    result = run("small", "--sizes", "64x64,256x128", "--frames", "1,9", "--device", "cpu", "--rounds", "1")
    assert result.exit_code == 0, result.output
    said, table = result.stdout.split("[kohya_bucket]")
    assert "small on cpu, float32: one block of width 128, times 2" in said
    assert "256x128, 9 frames     384" in said
    options = AdapterOptions.from_tables(("here", toml.loads(table)))
    assert options.model == "small"
    assert max(options.token_cost) > 0


def test_it_says_first_how_long_it_takes(small):
    arguments = ["small", "--sizes", "64x64,128x64", "--device", "cpu", "--rounds", "1"]
    assert "this will take about" in run(*arguments).output
    assert "this will take about" not in run(*arguments, "--quiet").output


def test_json_has_every_shape(small):
    result = run("small", "--sizes", "64x64,128x64", "--frames", "1,5", "--device", "cpu", "--rounds", "1", "--json")
    found = json.loads(result.stdout)
    assert [(s["width"], s["frames"], s["tokens"]) for s in found["shapes"]] == [
        (64, 1, 16), (64, 5, 32), (128, 1, 32), (128, 5, 64)
    ]  # fmt: skip
    assert all(s["seconds"] > 0 for s in found["shapes"])
    assert (found["device"], len(found["cost"])) == ("cpu, float32", 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["flix"], "MODEL is 'flix'.*'flux'"),
        (["flux", "--sizes", "512"], "--sizes is '512', but must be sizes such as 512x512,832x480"),
        (["flux", "--sizes", "0x512"], "--sizes is '0x512'"),
        (["wan-14b", "--frames", "1,0"], "--frames is '1,0', but must be whole numbers from 1 to 65,535, e.g. 1,25,81"),
        (["flux", "--sizes", "512x512,512x512"], "are all of 1,024 tokens: name a second shape"),
    ],
)
def test_what_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        raise run(*arguments).exception


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "abacus"], "--device abacus cannot be used: "),
        (["--dtype", "int8"], "--dtype is 'int8', but must be float32, bfloat16 or float16"),
    ],
)
def test_devices_that_are_none(small, arguments, words):
    with pytest.raises(ConfigError, match=words):
        raise run("small", "--sizes", "64x64,128x64", *arguments).exception
