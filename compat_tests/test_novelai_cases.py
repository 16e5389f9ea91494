"""NovelAI's program, five cases: its sets, its placement, and every batch of every epoch on every rank."""

import gzip
import json

import numpy as np
import pytest

from kohya_bucket import NovelAIBuckets
from kohya_bucket.buckets import Reason
from kohya_bucket.originals.novelai_epochs import CATCH_ALL, NovelAIEpochs

RULE_OPTIONS = ("max_size", "divisible", "min_dim", "base_res", "dim_limit", "max_ar_error")
CASES = 5


@pytest.fixture(scope="module")
def cases(reference_dir):
    with gzip.open(reference_dir / "novelai_cases.json.gz", "rt", encoding="utf-8") as file:
        loaded = json.load(file)
    assert len(loaded) == CASES
    return loaded


def rule_of(case) -> NovelAIBuckets:
    return NovelAIBuckets(**{k: v for k, v in case["params"].items() if k in RULE_OPTIONS})


@pytest.mark.parametrize("number", range(CASES))
def test_set_and_placement_are_equal(cases, number) -> None:
    case = cases[number]
    rule = rule_of(case)
    assert rule.bucket_set.sizes.tolist() == case["resolutions"]
    assert [repr(float(a)) for a in rule.aspects] == [repr(float(a)) for a in case["aspects"]]
    table = np.array(case["images"])
    placement = rule.place(table[:, 1:])
    placed = {str(i): int(b) for i, b in zip(table[:, 0], placement.bucket_index, strict=True) if b >= 0}
    assert placed == {k: v for k, v in case["bucket_of"].items() if int(k) not in case["pruned"]}
    assert set(table[placement.reasons == Reason.ASPECT_ERROR, 0].tolist()) == set(case["pruned"])


@pytest.mark.parametrize("number", range(CASES))
def test_every_batch_is_equal(cases, number) -> None:
    case = cases[number]
    rule, params = rule_of(case), case["params"]
    table = np.array(case["images"])
    index = rule.place(table[:, 1:]).bucket_index
    batches = 0
    for rank in range(case["world_size"]):
        epochs = NovelAIEpochs(index, params["bsz"], case["world_size"], rank, params["seed"], ids=table[:, 0])
        for expected in case["epochs"]:
            mine = []
            for rows, bucket in epochs.epoch():
                size = rule.base_res if bucket == CATCH_ALL else rule.bucket_set[bucket].as_tuple()
                mine.append([table[rows, 0].tolist(), list(size)])
            assert mine == expected[rank]
            batches += len(mine)
    print(f"\n{case['name']}: {batches} batches equal")
