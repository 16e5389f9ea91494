"""Options are named once: what is registered is offered, checked and described everywhere."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from plan_cases import SIZES, trained

from kohya_bucket.errors import ConfigError, PlanError
from kohya_bucket.planning import (
    ORDERS,
    REMAINDERS,
    RESOLUTION_MODES,
    EpochPlanner,
    LedgerReason,
    PlanOptions,
    plan_epoch,
)
from kohya_bucket.planning.options import EpochOptions
from kohya_bucket.planning.remainders import RemainderPolicy, change_of, moved_to

ROOT = Path(__file__).parents[2]
IDS = np.array([0] * 7 + [1] * 6)


def leave_the_first_out(demand, context):
    """The images with the smallest numbers, in every epoch the same ones."""
    over = demand.per_bucket() % context.global_batch
    rows = np.concatenate([np.flatnonzero(demand.bucket == k)[:n] for k, n in enumerate(over)])
    return demand.changed(rows, np.full(len(rows), -1)), [change_of(demand, rows, -1)]


@pytest.fixture
def toy(monkeypatch):
    policy = RemainderPolicy("first_out", "leaves the first ones out", leave_the_first_out, LedgerReason.DROPPED)
    monkeypatch.setitem(REMAINDERS, policy.name, policy)
    return policy.name


def test_a_new_policy_is_one_value(toy) -> None:
    plan = EpochPlanner(IDS, 4, remainder=toy).plan(epoch=3)
    assert np.flatnonzero(trained(plan) == 0).tolist() == [0, 1, 2, 7, 8]
    assert plan.ledger().text == "13 images, 5 missed (5 dropped with the remainder of 2 buckets), 0 repeated"
    with pytest.raises(PlanError, match=r"remainder is 'first_oud'.*'first_out'"):
        EpochPlanner(IDS, 4, remainder="first_oud")


def test_a_new_policy_is_offered_by_the_sampler_and_the_adapter(toy) -> None:
    pytest.importorskip("torch", reason="the sampler is torch's")
    from kohya_bucket import BucketBatchSampler
    from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
    from kohya_bucket.trainers.door.group import GroupPlanner
    from kohya_bucket.trainers.door.options import AdapterOptions
    from kohya_bucket.trainers.door.placing import place_images
    from kohya_bucket.trainers.door.sampler import PlanSampler

    sampler = BucketBatchSampler(IDS, 4, remainder=toy)
    assert sampler.drop_last
    assert sorted(i for batch in sampler for i in batch) == [3, 4, 5, 6, 9, 10, 11, 12]
    options = AdapterOptions.from_tables(("here", {"remainder": toy}))
    assert not options.several_sizes
    images = place_images(
        list("abcdefg"), np.full((7, 2), 512), np.ones(7, dtype=int), 4, DatasetKeys((512, 512), True), options
    )
    batches = PlanSampler(GroupPlanner([images.trained], options), 0, SimpleNamespace(value=1))
    assert sorted(i for batch in batches for i in batch.images.tolist()) == [3, 4, 5, 6]


def all_to_the_first(demand, context):
    """What does not fill a batch goes to bucket 0."""
    rows = np.flatnonzero(demand.bucket)[: np.count_nonzero(demand.bucket) % context.global_batch[0]]
    return moved_to(demand, rows, np.zeros(len(rows), dtype=np.int32))


def test_a_new_policy_may_move_images_and_need_sizes(monkeypatch) -> None:
    pytest.importorskip("torch", reason="the sampler is torch's")
    from kohya_bucket import BucketBatchSampler
    from kohya_bucket.trainers.door.options import AdapterOptions

    policy = RemainderPolicy(
        "to_first",
        "moves them",
        all_to_the_first,
        LedgerReason.MERGED,
        moves_images=True,
        needs_sizes="it looks at them",
    )
    monkeypatch.setitem(REMAINDERS, policy.name, policy)
    with pytest.raises(PlanError, match="remainder='to_first' needs bucket_sizes: it looks at them"):
        EpochPlanner(IDS, 4, remainder="to_first")
    sampler = BucketBatchSampler(IDS, 4, remainder="to_first", bucket_sizes=SIZES[:2])
    assert sampler.ledger().text == "13 images, 0 missed, 0 repeated, 2 trained in the next best bucket"
    assert {int(i): i.bucket for batch in sampler for i in batch} == dict(enumerate([0] * 9 + [1] * 4))
    # What is left of an epoch is not moved.
    assert not plan_epoch(IDS, 4, remainder="to_first", bucket_sizes=SIZES[:2], done=[(3, 1)]).moves
    assert AdapterOptions.from_tables(("here", {"remainder": "to_first"})).several_sizes


def test_the_adapter_offers_what_is_registered() -> None:
    from kohya_bucket.trainers.door.options import AdapterOptions

    for remainder, mode in zip(REMAINDERS, [*RESOLUTION_MODES, "all"], strict=True):
        needed = {"weighted": {"resolution_weights": [1, 2]}, "schedule": {"resolution_epochs": [1]}}.get(mode, {})
        table = {"remainder": remainder, "resolutions": [256, 512], "resolution_mode": mode, **needed}
        assert AdapterOptions.from_tables(("here", table)).remainder == remainder
    for order, value in ORDERS.items():
        if value.shuffles:
            table = {"order": order, "latent_cache": "shards" if value.uses_shards else "npz"}
            assert AdapterOptions.from_tables(("here", table)).order == order
        else:
            with pytest.raises(ConfigError, match=rf"order is '{order}'"):
                AdapterOptions.from_tables(("here", {"order": order}))
    with pytest.raises(ConfigError, match=r"here: \[kohya_bucket\] remainder is 'marge'.*'merge'"):
        AdapterOptions.from_tables(("here", {"remainder": "marge"}))


def test_every_name_is_its_values() -> None:
    for registry in (REMAINDERS, ORDERS, RESOLUTION_MODES):
        assert all(value.name == name and value.text for name, value in registry.items())
    # A stream does what it can do without knowing its length.
    streaming = pytest.importorskip("kohya_bucket.datasets.streaming", exc_type=ImportError)
    assert all(not REMAINDERS[name].moves_images for name in streaming.REMAINDERS)


def test_every_option_is_described() -> None:
    texts = "\n".join(inspect.getdoc(options) for options in (EpochOptions, PlanOptions))
    described = re.findall(r"^    (\w+):", texts, re.MULTILINE)
    assert {one.name for one in fields(PlanOptions)} == set(described) - {"PlanError"}


def callers():
    yield lambda **options: plan_epoch(IDS, 4, **options)
    yield lambda **options: EpochPlanner(IDS, 4, **options).plan()
    try:
        from kohya_bucket import BucketBatchSampler
    except ImportError:
        return
    yield lambda **options: BucketBatchSampler(IDS, 4, **options).plan()


@pytest.mark.parametrize("call", list(callers()))
def test_an_unknown_option_names_the_nearest(call) -> None:
    with pytest.raises(TypeError, match=r"'remander'.*'remainder'"):
        call(remander="keep")


def test_the_callers_own_arguments_are_among_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"plan_epoch .*'sed'.*'seed'"):
        plan_epoch(IDS, 4, sed=3)
    with pytest.raises(TypeError, match="EpochPlanner has no argument 'word_size'; the nearest is 'world_size'"):
        EpochPlanner(IDS, 4, word_size=3)


def test_what_saved_states_know_keeps_its_names() -> None:
    fingerprint = EpochPlanner(IDS, 4, remainder="merge", bucket_sizes=SIZES[:2], no_upscale=[True, False]).fingerprint
    assert list(fingerprint) == [
        "plan_version", "images", "images_per_bucket", "bucket_ids", "remainder", "order", "repeats", "regularization",
        "regularization_uses", "resolution_mode", "resolution_weights", "bucket_sizes", "bucket_groups", "run_length",
        "merge_max_crop", "base_bucket", "no_upscale", "equal_epochs", "small_buckets", "step_shapes",
        "item_costs", "global_batch",
    ]  # fmt: skip
    assert fingerprint["merge_max_crop"] == 0.25
    # Not in it: updates do not change steps, and budgets only change the global batch.
    of_shards = {"shards", "open_shards", "nodes"}
    assert {one.name for one in fields(PlanOptions)} - fingerprint.keys() == of_shards | {
        "accumulate", "largest_first", "resolution_epochs", "stages", "max_pixels", "max_tokens",
        "bucket_tokens", "token_cost",
    }  # fmt: skip
    assert of_shards < EpochPlanner(IDS, 4, order="local", shards=IDS).fingerprint.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge_max_crop": 0.05}, "merge_max_crop is 0.05, which has no effect without remainder = 'merge': set that"),
        ({"run_length": 3}, "run_length is 3, .* without order = 'runs'"),
        ({"open_shards": 3}, "open_shards is 3, .* without order = 'local'"),
        ({"largest_first": True, "order": "local", "shards": IDS, "bucket_sizes": SIZES[:2]}, "largest_first is True"),
        ({"largest_first": True}, "largest_first is set, but the buckets' sizes are unknown"),
        ({"nodes": 2}, "nodes is 2, .* without order = 'local'"),
        ({"base_bucket": 1}, "base_bucket is 1, .* without remainder = 'catch_all'"),
        ({"token_cost": (1, 0.5)}, "token_cost is .*, which has no effect without bucket_tokens"),
        ({"small_buckets": "pad"}, "small_buckets is 'pad', .* without remainder = 'drop'"),
        ({"resolution_epochs": [1]}, "resolution_epochs is .* without resolution_mode = 'schedule'"),
        ({"stages": IDS}, "stages is set, which has no effect without resolution_mode = 'schedule'"),
        ({"resolution_weights": [1, 3]}, "resolution_weights is .* without resolution_mode = 'weighted'"),
        ({"regularization_uses": 3}, "regularization_uses is 3, .* without regularization"),
    ],
)
def test_an_option_without_effect_is_refused(options, message) -> None:
    with pytest.raises(PlanError, match=message):
        plan_epoch(IDS, 4, **options)


@pytest.mark.parametrize(
    ("page", "start", "named", "registry"),
    [
        ("docs/planning.md", "## What becomes of the remainder", r"^\| `(\w+)` \| \d", REMAINDERS),
        ("docs/planning.md", "## What becomes of the remainder", r"^- \*\*(\w+)\*\*", REMAINDERS),
        ("docs/planning.md", "## In which order", r"^- \*\*(\w+)\*\*", ORDERS),
        ("docs/sd-scripts.md", "## Images at other sizes", r'^\| `resolution_mode = "(\w+)"`', RESOLUTION_MODES),
        ("docs/sd-scripts.md", "## Images at other sizes", r'^\| `remainder = "(\w+)"`',
         [name for name, policy in REMAINDERS.items() if policy.moves_images]),
    ],
)  # fmt: skip
def test_pages_list_what_is_registered(page, start, named, registry) -> None:
    section = (ROOT / page).read_text(encoding="utf-8").split(start, 1)[1].split("\n## ", 1)[0]
    assert re.findall(named, section, re.MULTILINE) == list(registry)


@pytest.mark.parametrize("ids", [[0, 0, 1, -1], [[0, 1], [-1, 0], [0, -1]]])
def test_a_fingerprint_counts_the_images_of_each_bucket(ids) -> None:
    options = {"resolution_mode": "all"} if isinstance(ids[0], list) else {}
    per_bucket = EpochPlanner(ids, 2, **options).fingerprint["images_per_bucket"]
    assert per_bucket == [np.count_nonzero(np.equal(ids, k)) for k in range(2)]


def test_the_table_of_options_names_what_is_offered() -> None:
    page = (ROOT / "docs/sd-scripts.md").read_text(encoding="utf-8")
    table = page.split("## Options", 1)[1].split("```toml\n[kohya_bucket]", 1)[1].split("```", 1)[0]
    offered = [
        *REMAINDERS,
        *RESOLUTION_MODES,
        *(name for name, order in ORDERS.items() if order.shuffles and not order.uses_shards),
    ]
    assert [name for name in offered if f'"{name}"' not in table] == []
