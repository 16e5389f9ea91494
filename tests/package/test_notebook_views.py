"""What a notebook shows of sets, placements and plans: whole, escaped, and small."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from kohya_bucket import BucketSet, FixedBuckets, KohyaBuckets, load_preset, plan_epoch

HOSTILE = "<script>alert(1)</script>\n\u202e" + "n" * 10_000
SIZES = np.random.default_rng(0).integers(64, 3000, (500, 2))


class Balanced(HTMLParser):
    """Collects texts of cells; fails where an element does not end."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.in_cell = False
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.open += [tag] if tag != "br" else []
        self.in_cell = tag == "td" or ("scope", "row") in attrs
        self.cells += [""] * self.in_cell

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag
        self.in_cell = False

    def handle_data(self, data) -> None:
        if self.in_cell:
            self.cells[-1] += data


def whole(shown: object) -> Balanced:
    page = shown._repr_html_()
    assert len(page) < 40_000
    assert "<svg" in page
    assert not re.search(r"<script|href=|src=|url\(|@import|[\n\u202e]", page)
    return Balanced(page)


def test_a_set_shows_all_of_its_buckets() -> None:
    preset = load_preset("sdxl")
    cells = whole(preset).cells
    assert cells[::3] == [str(bucket) for bucket in preset]
    assert preset.description.split()[0] in preset._repr_html_()
    assert preset._repr_html_().count("<circle") == len(preset)
    whole(BucketSet.from_dims([(64, 64)]))


def test_a_placement_shows_counts_and_reasons() -> None:
    sizes = np.concatenate([SIZES, [(0, 0), (9000, 10)]])
    placement = FixedBuckets(load_preset("sdxl"), max_crop=0.5).place(sizes)
    cells = whole(placement).cells
    counts = [int(n.replace(",", "")) for n in cells[1::5]]
    assert sum(counts) == placement.placed.sum()
    assert counts == [n for n in placement.images_per_bucket if n]
    page = placement._repr_html_()
    assert "1 without a bucket: its size could not be read" in page
    assert "every bucket would crop off more" in page
    assert "n=502" in repr(placement)
    whole(FixedBuckets(load_preset("sdxl")).place([]))
    whole(KohyaBuckets(1024, no_upscale=True).place([(0, 0)]))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_plan_shows_steps_and_its_ledger(world_size) -> None:
    placement = FixedBuckets(load_preset("sdxl")).place(SIZES)
    plan = plan_epoch(
        placement.bucket_index, 4, world_size=world_size, remainder="pad", bucket_sizes=placement.bucket_set.sizes
    )
    cells = whole(plan).cells
    assert sum(int(n.replace(",", "")) for n in cells[1::4]) == plan.steps - len(plan.mixed)
    assert sum(int(n.replace(",", "")) for n in cells[2::4]) == plan.samples
    assert plan.ledger().text in plan._repr_html_()
    assert cells[0] in {str(bucket) for bucket in placement.bucket_set}
    whole(plan_epoch([], 4))


def test_names_are_escaped_and_size_is_bounded() -> None:
    many = BucketSet.from_dims(
        [(64 + 8 * (i % 60), 64 + 8 * (i // 60)) for i in range(3000)], name=HOSTILE, description=HOSTILE
    )
    page = many._repr_html_()
    assert "&lt;script&gt;" in page
    assert "… and 2,960 more" in page
    assert len(whole(many).cells) == 40 * 3
    placement = FixedBuckets(many).place(np.random.default_rng(1).integers(30, 900, (20_000, 2)))
    assert "smaller buckets are not shown" in placement._repr_html_()
    whole(placement)
    whole(plan_epoch(placement.bucket_index, 2))
