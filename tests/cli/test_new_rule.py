"""A rule is a class, a function that makes it, and an entry in the registry: its name is then known everywhere."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kohya_bucket.buckets import BucketRule, rule_from_name
from kohya_bucket.buckets.rule import OwnSizes, RuleBase
from kohya_bucket.buckets.rules.registry import RULES, NamedRule, RuleRequest, rule_choices
from kohya_bucket.cli import app
from kohya_bucket.cli.commands.compare import comparable
from kohya_bucket.cli.group import load_command
from kohya_bucket.errors import BucketSettingsError, ConfigError
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, rule_for
from kohya_bucket.trainers.door.options import AdapterOptions


class ToyBuckets(RuleBase):
    """Each image's own size, floored to the step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def _assign(self, sizes):
        reasons = np.where(sizes.min(axis=1, initial=self.step) < self.step, 1 + (sizes.min(axis=1) > 0), 0)
        return OwnSizes(sizes, sizes // self.step * self.step, reasons.astype(np.uint8), self.step)


def toy_rule(request: RuleRequest) -> ToyBuckets:
    return ToyBuckets(request.reso_steps)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = NamedRule(
        text="whole steps", home=f"{__name__}:toy_rule", accepted_options=frozenset(), variants={"toy-64": {}}
    )
    monkeypatch.setitem(RULES, "toy", toy)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_one_method_makes_a_rule() -> None:
    rule, sizes = ToyBuckets(64), [(130, 200), (0, 5), (60, 300), (130, 200)]
    assert isinstance(rule, BucketRule)
    placement = rule.place(sizes)
    assert placement.bucket_sizes.tolist() == [[128, 192], [0, 0], [0, 0], [128, 192]]
    assert rule.assign_many_indices(sizes).tolist() == placement.bucket_index.tolist() == [0, -1, -1, 0]
    assert str(rule.assign(130, 200)) == "128x192"
    with pytest.raises(ValueError, match="60x300 has no bucket"):
        rule.assign(60, 300)
    assert rule.bucket_set is None


def test_its_name_is_known_to_python_and_to_configs() -> None:
    assert isinstance(rule_from_name("toy", max_reso=512), ToyBuckets)
    options = AdapterOptions.from_tables(("config", {"rule": "toy", "resolutions": [512, 768]}))
    assert isinstance(rule_for(DatasetKeys((512, 512), True, bucket_reso_steps=32), options), ToyBuckets)
    with pytest.raises(ConfigError, match=", ".join(rule_choices())):
        AdapterOptions.from_tables(("config", {"rule": "tony"}))


def test_its_name_is_known_to_commands() -> None:
    (found,) = json.loads(run("simulate", "1000x700", "--rule", "toy", "--json"))
    assert found["bucket"] == {"width": 960, "height": 640}
    help_of = {p.name: p.help for p in load_command("simulate").params}
    assert "toy" in help_of["rule"]
    assert {"toy", "toy-64"} <= set(comparable())
    rules = next(p for p in load_command("compare").params if p.name == "rules")
    assert "toy-64" in rules.help


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_upscale_fit": "largest"}, "which only the rules? kohya[^:]* ha(s|ve): leave it out with rule 'toy'"),
        ({"switching": "area"}, "switching is 'area', which only the rules kohya, [^:]*:NAME and "),
        ({"max_crop": 0.1}, "max_crop is 0.1, which only the rules kohya, "),
        ({"no_upscale": True}, "no_upscale is True, which only the rules kohya, "),
    ],
)
def test_what_it_does_not_take_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BucketSettingsError, match=message):
        rule_from_name("toy", max_reso=512, **options)


def test_it_is_listed_as_it_is_written() -> None:
    listed = list(rule_choices())
    assert listed[-1] == "toy"
    assert {"kohya", "preset:NAME", "file:PATH"} <= set(listed)
