"""The `[kohya_bucket]` table."""

import errno

import pytest

from kohya_bucket import ConfigError
from kohya_bucket.trainers.door.options import AdapterOptions, environment_table
from tests.faults import Faults


def test_later_tables_win():
    settings = AdapterOptions.from_tables(("a", {"remainder": "pad", "order": "runs"}), ("b", {"remainder": "drop"}))
    assert settings == AdapterOptions(remainder="drop", order="runs")


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"my.toml: \[kohya_bucket\] .*'remaindr'.*'remainder'"):
        AdapterOptions.from_tables(("my.toml", {"remaindr": "pad"}))


def test_all_mistakes_are_named_at_once():
    with pytest.raises(
        ConfigError, match=r"my.toml: .*'remaindr'.*; my.toml: .* order is 3.*; other: .* max_crop is 2"
    ):
        AdapterOptions.from_tables(("my.toml", {"remaindr": "pad", "order": 3}), ("other", {"max_crop": 2}))


def test_a_wrong_value_names_the_allowed():
    with pytest.raises(ConfigError, match="order is 'random'"):
        AdapterOptions.from_tables(("my.toml", {"order": "random"}))


def test_sizes_are_kept_on_this_machine():
    with pytest.raises(ConfigError, match=r"s3://bucket/sizes\.parquet.*on this machine"):
        AdapterOptions.from_tables(("here", {"metadata_cache": "s3://bucket/sizes.parquet"}))


def test_a_table_must_be_a_table():
    with pytest.raises(ConfigError, match="must be a table"):
        AdapterOptions.from_tables(("my.toml", 3))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", '[kohya_bucket]\nremainder = "pad"'),
        ("a.toml", 'remainder = "pad"'),
        ("a.json", '{"kohya_bucket": {"remainder": "pad"}}'),
    ],
)
def test_the_environment_names_a_file(tmp_path, monkeypatch, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("KOHYA_BUCKET_CONFIG", str(tmp_path / name))
    assert AdapterOptions.from_tables(*environment_table()).remainder == "pad"


@pytest.mark.parametrize(("text", "message"), [(None, "no such file"), ("[x", "cannot be parsed")])
def test_an_unusable_file_is_named(tmp_path, monkeypatch, text, message):
    file = tmp_path / "a.toml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("KOHYA_BUCKET_CONFIG", str(file))
    with pytest.raises(ConfigError, match=message):
        environment_table()


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENAMETOOLONG, errno.EIO], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, code):
    file = tmp_path / "a.toml"
    file.write_text('remainder = "pad"', encoding="utf-8")
    monkeypatch.setenv("KOHYA_BUCKET_CONFIG", str(file))
    faults = Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(1, 100), code), pytest.raises(ConfigError, match=r"a\.toml: cannot be read: .*unset it"):
        environment_table()


def test_without_the_variable_there_is_nothing(monkeypatch):
    monkeypatch.delenv("KOHYA_BUCKET_CONFIG", raising=False)
    assert environment_table() == []


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.toml", b"# gr\xfcn\n", "not UTF-8"),
        ("a.json", b"[1]", "must hold a table of options, not list"),
        ("a.json", b'"pad"', "must hold a table of options, not str"),
        ("a.toml", b"[[[", "cannot be parsed"),
    ],
)
def test_a_file_of_the_environment_that_holds_no_options(tmp_path, monkeypatch, name, content, why):
    (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("KOHYA_BUCKET_CONFIG", str(tmp_path / name))
    with pytest.raises(ConfigError, match=why):
        environment_table()


def test_a_file_of_the_environment_may_have_a_byte_order_mark(tmp_path, monkeypatch):
    (tmp_path / "a.toml").write_text('order = "runs"\n', encoding="utf-8-sig")
    monkeypatch.setenv("KOHYA_BUCKET_CONFIG", str(tmp_path / "a.toml"))
    assert AdapterOptions.from_tables(*environment_table()).order == "runs"


def test_tokens_are_those_of_a_model():
    with pytest.raises(ConfigError, match=r"max_tokens is set without model, .*: one of sd3-medium, .*wan-1\.3b"):
        AdapterOptions.from_tables(("here", {"max_tokens": 10_000}))
    options = AdapterOptions.from_tables(("here", {"max_tokens": 10_000, "model": "wan-1.3b"}))
    assert options.token_cost == (1, 1 / (6 * 1536))
    assert options.has_budget


@pytest.mark.parametrize(
    ("table", "message"), [({"model": "wan"}, "model is 'wan'.*'wan-14b'"), ({"max_tokens": 1.5}, "max_tokens is 1.5")]
)
def test_budgets_that_are_none(table, message):
    with pytest.raises(ConfigError, match=message):
        AdapterOptions.from_tables(("here", table))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "order is 'local', but latents lie in files of their own: set latent_cache = 'shards'"),
        ({"latent_cache": "shards", "resolutions": [512, 768]}, "lie in several shards: leave out one of them"),
        (
            {"latent_cache": "shards", "step_shapes": "equal_cost"},
            "step_shapes = 'equal_cost' joins batches of several buckets",
        ),
        ({"latent_cache": "shards", "open_shards": 1}, "open_shards is 1"),
    ],
)
def test_an_order_by_shards_that_cannot_be(table, message):
    assert AdapterOptions.from_tables(("here", {"latent_cache": "shards", "order": "local"})).open_shards == 64
    with pytest.raises(ConfigError, match=message):
        AdapterOptions.from_tables(("here", {"order": "local"} | table))
