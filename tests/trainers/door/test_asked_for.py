"""Whatever a `[kohya_bucket]` table asks for changes what is trained, or is refused, or is said to do nothing."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kohya_bucket import KohyaBucketError
from kohya_bucket.planning.fingerprint import digest_of
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, without_effect_on
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placing import place_images
from tests.thinned import one_in

# values that are far from the default, so that what heeds them shows it in 150 images
VALUES: dict[str, list[Any]] = {
    "rule": ["token_band", "exact", "auto"],
    "switching": ["area"],  # `geometric` is what some rules do by themselves
    "no_upscale_fit": ["largest", "standard"],
    "max_crop": [0.15],
    "token_tolerance": [0.3],
    "num_buckets": [3],
    "auto_method": ["optimal"],
    "remainder": ["pad", "drop", "merge", "catch_all"],
    "small_buckets": ["pad", "drop", "merge"],
    "merge_max_crop": [0.9, 0.0],
    "resolutions": [[512, 768]],
    "resolution_mode": ["rotate", "weighted", "schedule"],
    "resolution_weights": [[5, 1]],
    "resolution_epochs": [[1]],
    "largest_first": [True],
    "order": ["runs", "local"],
    "run_length": [2],
    "open_shards": [2],
    "max_pixels": [3_000_000],
    "max_tokens": [9_000],
    "model": ["flux", "wan-1.3b"],
    "step_shapes": ["one"],
    "latent_cache": ["shards"],
    "latent_cache_dir": ["store"],
}
# what an order by shards needs besides, and what only measures the cost of shapes, which may order all shapes alike
NOT_OF_PLANS = ("latent_cache", "latent_cache_dir", "model")
BUDGETS = {"max_pixels", "max_tokens"}  # of two, the narrower one counts
COUNT = 150
KEYS = [(640, 448), (768, 768), (512, 512)]  # one after the other, until what is asked for shows


def drawn(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(list(VALUES), draw.randint(1, 4))
    return {name: draw.choice(VALUES[name]) for name in names}


def read(table: dict[str, Any]) -> AdapterOptions:
    return AdapterOptions.from_tables(("here", table))


def trained(options: AdapterOptions, case: int, folder: Path, *, no_upscale: bool) -> str:
    """All that follows from a table: buckets, sizes, crops, and three epochs on one and on two processes."""
    keys = DatasetKeys(KEYS[case], True, 320, 1024, 64, no_upscale)
    draw = np.random.default_rng(case)
    sides = np.exp(draw.uniform(np.log(300), np.log(1800), (COUNT, 2))).astype(np.int32)
    names = [f"{k:03}.png" for k in range(COUNT)]
    placing = place_images(names, sides, np.ones(COUNT, dtype=np.int64), 4, keys, options,
                           paths=[str(folder / name) for name in names])  # fmt: skip
    found = [digest_of(value) for one in placing.placements for value in (one.bucket_sizes, one.cuts, one.placed)]
    planner = GroupPlanner([placing.trained], options, draw.integers(0, 12, len(placing.trained.keys)))
    for ranks in (1, 2):
        for epoch in range(3):
            plan = planner.planner(ranks).plan(epoch, 1)
            steps = [(plan.bucket(k, rank), plan.indices(k, rank).tolist()) for k in range(plan.steps)
                     for rank in range(ranks)]  # fmt: skip
            found.append(str(steps))
    return json.dumps(found)


@pytest.mark.long
@pytest.mark.parametrize("no_upscale", one_in(2, [False, True]))
def test_what_is_asked_for_matters_or_is_refused_or_said(no_upscale: bool, tmp_path: Path) -> None:
    draw = random.Random(7 + no_upscale)
    silent, checked = [], 0
    for _ in range(270):
        table = drawn(draw)
        try:
            options = read(table)
            with_all = trained(options, 0, tmp_path, no_upscale=no_upscale)
        except KohyaBucketError:
            continue  # refused
        line = without_effect_on(DatasetKeys(KEYS[0], True, bucket_no_upscale=no_upscale), options)
        said = [name for name in table if f"[kohya_bucket] {name} " in line]
        for name in table:
            if name in NOT_OF_PLANS or (name in BUDGETS and len(BUDGETS & table.keys()) > 1):
                continue
            try:
                rest = read({key: value for key, value in table.items() if key != name})
                same = trained(rest, 0, tmp_path, no_upscale=no_upscale) == with_all
                for case in range(1, len(KEYS) if same else 0):
                    one, other = (trained(each, case, tmp_path, no_upscale=no_upscale) for each in (rest, options))
                    same = same and one == other
            except KohyaBucketError:
                continue  # the others need it
            checked += 1
            if same != (name in said):
                silent.append((table, name, "said" if name in said else "silent"))
    assert not silent, "\n".join(map(str, silent))
    assert checked > 40
