"""Which of a trainer's options are given, on its command line or in the file that this names, and what needs more."""

import importlib.util
from types import SimpleNamespace

import pytest

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.errors import ConfigError
from kohya_bucket.sdscripts.unknown import given_options, refuse_what_needs


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ([], set()),
        (["model"], set()),
        (["--resume", "state", "--seed=3"], {"resume", "seed"}),
        (["--config_file"], {"config_file"}),
    ],
)
def test_of_the_command_line(arguments, given):
    assert given_options(arguments) == given


@pytest.mark.parametrize("spelling", [["--config_file", "FILE.toml"], ["--config_file=FILE"]])
def test_of_the_file_that_it_names(tmp_path, spelling):
    (tmp_path / "a.toml").write_text("seed = 3\n[training]\nresume = 'state'\nsdpa = false\n", encoding="utf-8")
    given = given_options([word.replace("FILE", str(tmp_path / "a")) for word in spelling])
    assert given == {"config_file", "training", "seed", "resume"}


def test_text_shards_are_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    option = AdapterOptions(text_cache="shards")
    by_strategies, without = SimpleNamespace(has=lambda _: True), SimpleNamespace(has=lambda _: False)
    changed = {"text-caching": SimpleNamespace(problems=("x is gone",))}
    with pytest.raises(ConfigError, match=r"text_cache = 'shards' needs a part of sd-scripts that looks .*: x is gone"):
        refuse_what_needs(changed, option, by_strategies)
    with pytest.raises(ConfigError, match=r"text_cache = 'shards' needs .*0\.10 or newer.*own cache is used"):
        refuse_what_needs({}, option, without)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="text_cache = 'shards' needs pyarrow, which is not installed"):
        refuse_what_needs({}, option, by_strategies)
    refuse_what_needs(changed, AdapterOptions(), without)
