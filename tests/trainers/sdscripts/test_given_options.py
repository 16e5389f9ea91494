"""Which of a trainer's options are given, on its command line or in the file that this names, and what needs more."""

import importlib.util
from types import SimpleNamespace

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


SHARDS = [
    ("latent_cache", "caching", "BaseDataset.new_cache_latents", "caches latents by"),
    ("text_cache", "text-caching", "BaseDataset.new_cache_text_encoder_outputs", "caches text-encoder outputs by"),
]


@pytest.mark.parametrize(("option", "subject", "seam", "what"), SHARDS)
def test_shards_are_refused_before_anything_is_read(monkeypatch, option, subject, seam, what):
    monkeypatch.setattr("sys.argv", ["train.py"])
    options = AdapterOptions(**{option: "shards"})
    by_strategies, without = SimpleNamespace(has=lambda _: True), SimpleNamespace(has=lambda path: path != seam)
    changed = {subject: "x is gone"}
    refuse_what_needs({}, options, by_strategies)
    with pytest.raises(ConfigError, match=rf"{option} = 'shards' needs a part of sd-scripts that looks .*: x is gone"):
        refuse_what_needs(changed, options, by_strategies)
    with pytest.raises(ConfigError, match=rf"{option} = 'shards' needs .*{what}.*0\.10 or newer.*own cache is used"):
        refuse_what_needs({}, options, without)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"{option} = 'shards' needs pyarrow"):
        refuse_what_needs({}, options, by_strategies)
    refuse_what_needs(changed, AdapterOptions(), without)


def test_shards_of_one_kind_need_nothing_of_the_other(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    for option, _, seam, _ in SHARDS:
        only = SimpleNamespace(has=lambda path, seam=seam: path == seam)
        others = {subject: "x is gone" for name, subject, _, _ in SHARDS if name != option}
        refuse_what_needs(others, AdapterOptions(**{option: "shards"}), only)


def test_several_sizes_in_caches_need_their_part_known_with_shards_and_without(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--cache_latents"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    changed, by_strategies = {"caching": "x is gone"}, SimpleNamespace(has=lambda _: True)
    several = {"resolutions": (64, 128)}
    for option in ({}, {"text_cache": "shards"}):
        with pytest.raises(ConfigError, match="--cache_latents with several sizes for an image needs a part"):
            refuse_what_needs(changed, AdapterOptions(**several, **option), by_strategies)
    with pytest.raises(ConfigError, match="latent_cache = 'shards' needs a part"):
        refuse_what_needs(changed, AdapterOptions(**several, latent_cache="shards"), by_strategies)
