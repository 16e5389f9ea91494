"""What sd-scripts' log says of the buckets."""

import numpy as np
import pytest

from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placing import place_images
from kohya_bucket.trainers.sdscripts.wording import rule_text

SIZES = np.array([(600, 300), (300, 600), (400, 400), (610, 305)], dtype=np.int32)


def said(table, **more):
    options = AdapterOptions.from_tables(("here", table))
    keys = DatasetKeys((256, 256), True, 64, 1024)
    names = [f"{i}.png" for i in range(len(SIZES))]
    placing = place_images(names, SIZES, np.ones(len(SIZES), dtype=np.int64), 2, keys, options)
    return rule_text(placing.trained, options, **{"enable_bucket": True, **more})


@pytest.mark.parametrize(("rule", "text"), [("kohya", "sd-scripts' buckets"), ("preset:sdxl", "rule preset:sdxl")])
def test_the_rule_is_named(rule, text):
    assert said({"rule": rule}) == text


def test_auto_says_what_it_chose():
    table = {"rule": "auto", "num_buckets": 3, "auto_method": "optimal"}
    assert said(table) == "rule auto (optimal) chose 128x256, 256x256, 256x128"


def test_auto_at_several_resolutions_names_the_buckets_of_each():
    one = said({"rule": "auto", "num_buckets": 2})
    both = said({"rule": "auto", "num_buckets": 2, "resolutions": [256, 512]})
    assert both.startswith(one)
    assert both.count("x") == 2 * one.count("x")


def test_where_no_rule_decides():
    assert said({}, enable_bucket=False) == "no buckets: enable_bucket is off"
