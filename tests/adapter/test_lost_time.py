"""A run is told, before it trains, of an option with which its GPUs would wait much less."""

import re

import pytest

pytest.importorskip("torch", reason="the sampler is torch's")

from test_sampler_positions import sampler_of

from kohya_bucket.adapter import sampler as sampler_module
from kohya_bucket.adapter.lost_time import lost_time, plans_of


@pytest.fixture
def said(monkeypatch, caplog):
    """What a run with a table says at its start, on so many GPUs."""
    monkeypatch.setattr(sampler_module.PlanSampler, "_agreed", lambda _, seed: seed)

    def start(table, gpus, batch_size=2):
        monkeypatch.setattr(sampler_module, "world", lambda: (gpus, 0))
        caplog.clear()
        made = sampler_of(table, batch_size)
        return made, [line for line in caplog.messages if "same_shape" in line]

    return start


@pytest.mark.parametrize("table", [{}, {"resolutions": [256, 384]}])
def test_few_images_of_a_shape_on_several_gpus(said, table):
    sampler, (line,) = said(table, 8)
    lost = lost_time(plans_of(sampler.planner, sampler.seed), 8, sampler.seed)
    assert [f"{lost.one_shape:.0%}", f"{lost.equal_cost:.0%}"] == re.findall(r"\d+%", line)
    assert lost.equal_cost < lost.one_shape / 2


@pytest.mark.parametrize(
    ("table", "gpus"),
    [({}, 1), ({"same_shape": "cost"}, 8), ({"same_shape": False}, 8)],
)
def test_nothing_is_said_where_it_would_not_help(said, table, gpus):
    assert said(table, gpus)[1] == []


def test_nothing_is_said_where_little_is_lost(said):
    sampler, lines = said({}, 2, batch_size=1)
    assert lost_time(plans_of(sampler.planner, sampler.seed), 2, sampler.seed).one_shape < 0.1
    assert lines == []
