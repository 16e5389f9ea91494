"""The options that make a bucket rule: the same everywhere, with sd-scripts' defaults."""

import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket.buckets import KohyaBuckets, list_presets, load_preset
from kohya_bucket.buckets.choices import AUTO_METHODS, NO_UPSCALE_FITS, SWITCHING_METHODS, TRAINERS, described
from kohya_bucket.buckets.rules.registry import rule_choices
from kohya_bucket.cli.commands.compare import comparable, compared_rule, groups, names_of
from kohya_bucket.cli.group import load_command
from kohya_bucket.cli.options import RuleArguments
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.trainers.door.dataset_keys import adjust_to_steps
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.config.keys import DEFAULTS

COMMANDS = ("simulate", "analyze", "compare", "buckets chart", "buckets make", "precompute")
SIZES = np.random.default_rng(0).integers(300, 3000, (200, 2)).astype(np.int32)


NAMES = [field.name for field in fields(RuleArguments) if field.name != "auto_method"]  # commands name the set instead


def parameters(command: str):
    first, *parts = command.split()
    found = load_command(first)
    return {p.name: p for p in (found.commands[parts[0]] if parts else found).params}


def options_of(command: str):
    return {name: p for name, p in parameters(command).items() if name in NAMES}


def test_what_is_not_given_is_what_sd_scripts_takes() -> None:
    adapter = AdapterOptions()
    for field in fields(RuleArguments):
        if field.name in DEFAULTS and field.name != "resolution":  # which sd-scripts wants given
            assert field.default == DEFAULTS[field.name]
        elif hasattr(adapter, field.name) and field.name != "rule":
            assert field.default == getattr(adapter, field.name)
    assert repr(RuleArguments().make()) == repr(KohyaBuckets((512, 512), 256, 1024, 64))


@pytest.mark.parametrize("command", COMMANDS)
def test_all_commands_mean_the_same_by_an_option(command: str) -> None:
    common = options_of("precompute")
    assert set(common) == set(NAMES)
    mine = options_of(command)
    assert {"resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps"} <= set(mine)
    for name, option in mine.items():
        other = common[name]
        assert (option.default, option.help) == (other.default, other.help)
        assert set(other.opts) <= set(option.opts)


def test_the_page_lists_them_with_their_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line.split(" | ")[1] for line in page.splitlines() if line.startswith("| `--")}
    assert set(rows) == {f"--{name.replace('_', '-')}" for name in NAMES}
    for name, option in options_of("precompute").items():
        if option.default not in (None, False):
            assert rows[f"--{name.replace('_', '-')}"] == f"`{option.default}`"


def test_the_help_names_what_there_is() -> None:
    texts = {name: option.help for name, option in options_of("precompute").items()}
    assert texts["rule"] == f"{', '.join(rule_choices())}."
    choices = {"switching": SWITCHING_METHODS, "no_upscale_fit": NO_UPSCALE_FITS}
    for name, known in choices.items():
        assert texts[name].startswith(described(known))
    assert parameters("buckets make")["method"].help.startswith(described(AUTO_METHODS))


@pytest.mark.parametrize("name", list_presets())
def test_a_preset_is_taken_whatever_its_step(name: str) -> None:
    assert RuleArguments(preset=name).make().bucket_set == load_preset(name)


def test_sides_are_rounded_to_the_step_as_sd_scripts_does() -> None:
    assert adjust_to_steps(RuleArguments(min_bucket_reso=300, max_bucket_reso=1000).keys) == (256, 1024)


def test_what_sd_scripts_stops_at_is_refused_for_every_rule() -> None:
    for rule in (None, "novelai", "exact", "auto"):
        with pytest.raises(KohyaBucketError, match="--max-bucket-reso 1024"):
            RuleArguments(rule=rule, resolution="1536").make(SIZES)
        RuleArguments(rule=rule, resolution="1536", max_bucket_reso=1536).make(SIZES)
    with pytest.raises(KohyaBucketError, match="--min-bucket-reso 640"):
        RuleArguments(min_bucket_reso=640, bucket_no_upscale=True).make()


def test_one_rule_is_named() -> None:
    assert RuleArguments(rule="preset:sdxl").name == RuleArguments(preset="sdxl").name == "preset:sdxl"
    with pytest.raises(ConfigError, match="--rule and --preset"):
        _ = RuleArguments(rule="kohya", preset="sdxl").name


@pytest.mark.parametrize("text", ["832,1216", "832x1216", "832X1216", "832×1216", " 832 , 1216 "])
def test_a_resolution_is_spelled_in_several_ways(text: str) -> None:
    assert RuleArguments(resolution=text).size == (832, 1216)


@pytest.mark.parametrize("name", groups()["all"])
def test_every_name_that_can_be_compared_makes_a_rule(name: str) -> None:
    rule = compared_rule(name, RuleArguments(), SIZES)
    assert rule.place(SIZES).placed.any()


def test_the_rules_are_those_of_their_names() -> None:
    options = RuleArguments(resolution="1024", max_bucket_reso=2048, num_buckets=3)
    largest = compared_rule("kohya-largest", options, SIZES)
    assert (largest.no_upscale, largest.no_upscale_fit) == (True, "largest")
    assert compared_rule("auto-optimal", options, SIZES).result.method == "optimal"
    area = RuleArguments(resolution="1024", max_bucket_reso=2048, switching="area")
    assert compared_rule("exact", area, SIZES).max_side == 2048
    assert compared_rule("kohya", area, SIZES).switching == "area"
    others = replace(area, max_crop=0.1, num_buckets=3, token_tolerance=0.2)  # a trainer has none of them
    stock = compared_rule("kohya", replace(area, switching=None), SIZES)
    assert repr(compared_rule("sd-scripts", others, SIZES)) == repr(stock)
    for name in TRAINERS:
        assert type(compared_rule(name, options, SIZES)) is TRAINERS[name].load()
    with pytest.raises(ConfigError, match=r"'konya'.*, all.*'kohya'"):
        compared_rule("konya", options, SIZES)


def test_names_are_split_and_groups_taken_apart() -> None:
    assert names_of("kohya, exact,,kohya", comparable(), groups()) == ["kohya", "exact"]
    assert names_of("kohya,trainers", comparable(), groups()) == ["kohya", "sd-scripts", *TRAINERS]
    assert names_of("all", comparable(), groups()) == groups()["all"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-crop", "10%"], "--max-crop is '10%', but must be a number, as a share: 0.1 for 10%"),
        (["--min-bucket-reso", "1e9"], "--min-bucket-reso is '1e9'"),
        (["--min-bucket-reso", "5000"], "--min-bucket-reso 5000"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_with_its_value(command_line, arguments, message) -> None:
    code, output, errors = command_line("simulate", "800x600", *arguments)
    assert (code, output, len(errors.splitlines())) == (2, "", 1)
    assert message in errors


@pytest.mark.parametrize("rule", [[], ["--rule", "auto"], ["--rule", "exact"]])
@pytest.mark.parametrize("command", [["analyze"], ["compare", "--rules", "auto,trainers"], ["buckets", "make"],
                                     ["buckets", "chart"], ["precompute", "--vae", "v"]])  # fmt: skip
def test_a_small_resolution_is_refused_before_anything_is_read(command_line, command, rule) -> None:
    """As sd-scripts stops there, too, with its defaults; what the one option to add is, is said."""
    if command[0] == "compare" or command[-1] == "make":
        rule = []
    code, _, errors = command_line(*command, "no such folder", "--resolution", "128", *rule)
    assert code == 2
    assert errors == (
        "kohya-bucket: --min-bucket-reso 256 is above the shorter side of resolution 128x128: "
        "set --min-bucket-reso to 128 or raise the resolution\n"
    )


def test_a_page_lists_every_model_of_musubi_tuner_by_its_long_name() -> None:
    from kohya_bucket.cli.options import SHARED
    from kohya_bucket.trainers.musubi.families import long_names

    page = (Path(__file__).parents[2] / "docs" / "musubi.md").read_text(encoding="utf-8")
    assert re.findall(r"`([^`]+)`", page.split("`--arch` names the model: ", 1)[1].split(";", 1)[0]) == long_names()
    named = SHARED["arch"].split("musubi-tuner ", 1)[1].split(", …", 1)[0].split(", ")
    assert set(named) < set(long_names())
