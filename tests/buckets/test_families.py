"""One word for a model: the same values in the library, in every command and in the explorer."""

import json
import re

import pytest
from typer.testing import CliRunner

from kohya_bucket import KohyaBuckets, rule_from_name
from kohya_bucket.buckets.families import FAMILIES, family_named
from kohya_bucket.cli import app
from kohya_bucket.cli.options import RuleArguments
from kohya_bucket.errors import ConfigError
from kohya_bucket.reports.explorer_page import render_explorer
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES, trainer_named

SIZES = [(3000, 1000), (700, 1400), (1024, 1024), (640, 480)]


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_command_places_as_the_library_does(arch: str) -> None:
    rule = KohyaBuckets.for_arch(arch)
    for width, height in SIZES:
        result = CliRunner().invoke(app, ["simulate", f"{width}x{height}", "--arch", arch, "--json"])
        (row,) = json.loads(result.output)
        bucket = rule.assign(width, height)
        assert (row["bucket"]["width"], row["bucket"]["height"]) == (bucket.width, bucket.height)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_trainers_of_a_family_accept_its_step(arch: str) -> None:
    assert trainer_named(arch).refusing(family_named(arch).reso_steps) == {}


def test_what_is_given_beside_it_wins() -> None:
    result = CliRunner().invoke(app, ["simulate", "3000x1000", "--arch", "SD 1.5", "--resolution", "768", "--json"])
    assert json.loads(result.output)[0]["settings"] == "768x768, kohya"
    rule = KohyaBuckets.for_arch("sdxl", no_upscale=True, max_size=1536)
    assert (rule.max_reso, rule.max_size, rule.no_upscale) == ((1024, 1024), 1536, True)


def test_the_explorer_has_the_same_values() -> None:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', render_explorer(), re.S)
    assert data is not None
    assert [tuple(row) for row in json.loads(data[1])["families"]] == list(FAMILIES.values())


def test_the_explorer_begins_with_the_defaults_of_commands() -> None:
    options, first = RuleArguments(), next(iter(FAMILIES.values()))
    limits = options.min_bucket_reso, options.max_bucket_reso, options.bucket_reso_steps
    assert (options.size, *limits) == ((first.resolution,) * 2, first.min_size, first.max_size, first.reso_steps)


@pytest.mark.parametrize(("resolution", "longest"), [(512, 1024), (1024, 2048), ((832, 1216), 2048), (1100, 2240)])
def test_without_a_longest_side_it_is_twice_the_resolution(resolution: object, longest: int) -> None:
    assert KohyaBuckets(resolution).max_size == longest


@pytest.mark.parametrize("size", [(4000, 1000), (1000, 3000), (1024, 1024)])
def test_a_rule_by_its_name_places_as_the_class(size: tuple[int, int]) -> None:
    named = rule_from_name("kohya", max_reso=1024)
    assert named.place([size]).bucket_sizes.tolist() == KohyaBuckets(1024).place([size]).bucket_sizes.tolist()


def test_a_keyword_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'max_sise'.*'max_size'"):
        KohyaBuckets.for_arch("sdxl", max_sise=512)


def test_no_such_family() -> None:
    with pytest.raises(ConfigError, match=r"'sdxl'$"):
        KohyaBuckets.for_arch("sdxk")
    result = CliRunner().invoke(app, ["simulate", "640x480", "--arch", "sdxk"])
    assert str(result.exception).endswith("'sdxl'")


def test_a_longest_side_that_nobody_chose_says_what_it_costs() -> None:
    def said(*options: str) -> str:
        return CliRunner().invoke(app, ["simulate", "3000x1000", *options]).output

    assert "with 2048, it is 1728x576" in said("--resolution", "1024")
    assert "with 2048" not in said("--resolution", "1024", "--max-bucket-reso", "1024") + said("--arch", "sdxl")
