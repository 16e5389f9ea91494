"""Which of a trainer's options are given, on its command line or in the file that this names, and what needs more."""

import importlib.util

import pytest

from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.refusals import given_options, refuse_what_needs


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
    assert given == {"config_file", "seed", "resume"}


def test_what_needs_an_unknown_part_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--cache_latents"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    changed, several = {"caching": "x is gone"}, {"resolutions": (64, 128)}
    shards = AdapterOptions(latent_cache="shards")
    refuse_what_needs({}, shards)
    refuse_what_needs({"text-caching": "x is gone"}, shards)
    refuse_what_needs(changed, AdapterOptions())
    with pytest.raises(ConfigError, match="--cache_latents with several sizes for an image needs a part"):
        refuse_what_needs(changed, AdapterOptions(**several))
    for options in (shards, AdapterOptions(**several, latent_cache="shards")):
        with pytest.raises(ConfigError, match=r"latent_cache = 'shards' needs a part of sd-scripts .*: x is gone"):
            refuse_what_needs(changed, options)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="latent_cache = 'shards' needs pyarrow"):
        refuse_what_needs({}, shards)
