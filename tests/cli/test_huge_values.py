"""Values far beyond all reason, as a slip of the finger makes them: one clear error, at once."""

import difflib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kohya_bucket.buckets import ExactBuckets, FixedBuckets, KohyaBuckets, NovelAIBuckets, Reason, load_preset
from kohya_bucket.buckets.choices import TRAINERS
from kohya_bucket.buckets.rules.kohya import kohya_bucket_sizes
from kohya_bucket.buckets.rules.novelai import novelai_bucket_sizes
from kohya_bucket.cli import app
from kohya_bucket.errors import KohyaBucketError, PlanError, StorageError
from kohya_bucket.planning import demand_model as memory
from kohya_bucket.planning import plan_epoch

HUGE = 10**23
CONFIG = """
[[datasets]]
resolution = 512
enable_bucket = true
{dataset}
[[datasets.subsets]]
image_dir = '{folder}'
[kohya_bucket]
{table}
"""


def planned(folder: Path, dataset: str = "", table: str = "", *options: str) -> str:
    config = folder.parent / "c.toml"
    config.write_text(CONFIG.format(folder=folder, dataset=dataset, table=table), encoding="utf-8")
    result = CliRunner().invoke(app, ["plan", str(config), *options])
    assert isinstance(result.exception, (KohyaBucketError, SystemExit)), result.exception
    return f"{result.output}{result.exception}"


def test_the_adapters_settings(folder: Path) -> None:
    assert "max_pixels is 100000000000000000000000" in planned(folder, table=f"max_pixels={HUGE}")
    table = f"order='runs'\nrun_length={HUGE}"
    assert "run_length is 100000000000000000000000" in planned(folder, table=table)
    weights = "resolutions=[512, 768]\nresolution_mode='weighted'\nresolution_weights=[inf, 1.0]"
    assert "resolution_weights is [inf, 1.0], but must be a list of numbers" in planned(folder, table=weights)
    many = f"rule='auto'\nnum_buckets={HUGE}"
    assert "num_buckets is 100000000000000000000000" in planned(folder, table=many)
    assert "num_buckets is 65537, but must be 65,536 or less" in planned(folder, table="rule='auto'\nnum_buckets=65537")


def test_the_datasets_settings(folder: Path) -> None:
    expected = "batch_size is 100000000000000000000000, but must be less than 2,147,483,648"
    assert planned(folder, f"batch_size={HUGE}") == expected


def test_gpus(folder: Path) -> None:
    assert "--gpus is '99999999999'" in planned(folder, "", "", "--gpus", "99999999999")


@pytest.mark.parametrize("name", ["world_size", "accumulate", "run_length"])
def test_planning(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} is {HUGE}"):
        plan_epoch([0, 0, 1], 2, **{name: HUGE})  # type: ignore[arg-type]


def test_a_resolution() -> None:
    with pytest.raises(KohyaBucketError, match="no side can be above 1,000,000 pixels"):
        KohyaBuckets(10**11, max_size=64 * 10**10)


def test_a_limit_beyond_the_area_changes_nothing() -> None:
    assert kohya_bucket_sizes((512, 512), 64, 4096) == kohya_bucket_sizes((512, 512), 64, 64 * 10**15)
    rest = ((768, 512), 64, 256, (512, 512))
    assert novelai_bucket_sizes(*rest, dim_limit=1536) == novelai_bucket_sizes(*rest, dim_limit=10**18)


def test_repeats_say_what_memory_they_take_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_machine_memory", lambda: 16 << 30)
    for repeats in (10**9, [10**9, 10**9]):
        with pytest.raises(PlanError, match=r"2,000,000,000 images.* about 93 GiB .* has 16 GiB"):
            plan_epoch([0, 0], 2, repeats=repeats)
    assert plan_epoch([0, 0], 2, repeats=1000).asked == 2000


@pytest.mark.parametrize("epoch", [2**31, 2**62, 10**30])
def test_epochs(epoch: int) -> None:
    with pytest.raises(PlanError, match="epoch is"):
        plan_epoch([0, 0], 2, repeats=1.5, epoch=epoch)


SIDES = (1, 7, 512, 46_341, 65_536, 10**6, 2**30, 2**31 - 64, 2**31 - 1)
RULES = {
    "kohya": KohyaBuckets(1024),
    "kohya-max-crop": KohyaBuckets(1024, max_crop=0.3),
    "kohya-no-upscale": KohyaBuckets(1024, no_upscale=True),
    "kohya-largest": KohyaBuckets(1024, no_upscale=True, no_upscale_fit="largest", max_crop=0.3),
    "novelai": NovelAIBuckets(),
    "exact": ExactBuckets(1024),
    "sdxl": FixedBuckets(load_preset("sdxl")),
    **{name: TRAINERS[name].load()(1024) for name in TRAINERS},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", RULES)
def test_no_side_of_an_image_overflows(name: str) -> None:
    sizes = np.array(list(itertools.product(SIDES, SIDES)), dtype=np.int32)
    rule = RULES[name]
    placement = rule.place(sizes)
    placed = placement.placed
    assert placed.any()
    buckets, resized = placement.bucket_sizes[placed], placement.resized_sizes[placed].astype(np.int64)
    assert (resized >= buckets).all()
    assert ((placement.crop_loss[placed] >= 0) & (placement.crop_loss[placed] < 1)).all()
    assert (placement.reasons[~placed] > 0).all()
    np.testing.assert_array_equal(rule.assign_many_indices(sizes), placement.bucket_index)
    if name in ("kohya", "sdxl"):
        thinnest = int(np.flatnonzero((sizes == (1, SIDES[-1])).all(axis=1))[0])
        assert placement.reason(thinnest) is Reason.TOO_LONG


def test_simulate_says_why_a_size_has_no_bucket() -> None:
    result = CliRunner().invoke(app, ["simulate", "2147483647x1"])
    assert (result.exit_code, "more than 2,147,483,647 pixels" in result.output) == (1, True)


@pytest.mark.parametrize("command", ["plan", "doctor", "analyze --config"])
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("num_repeats = 9223372036854775808", "is 9,223,372,036,854,775,808, but no more than 100,000 can be planned"),
        ("num_repeats = 3000000", "num_repeats is 3,000,000, but no more than 100,000 can be planned"),
        ("validation_split = 1e308", "validation_split is 1e+308, but must be from 0 to 1"),
    ],
)
def test_numbers_that_no_epoch_has(command_line, folder, command, line, told) -> None:
    at_dataset = line if line.startswith("validation") else ""
    file = folder.parent / "c.toml"
    file.write_text(
        f"[[datasets]]\nresolution = 512\nenable_bucket = true\n{at_dataset}\n[[datasets.subsets]]\n"
        f"image_dir = '{folder}'\n{'' if at_dataset else line}\n",
        encoding="utf-8",
    )
    code, out, errors = command_line(*command.split(), file)
    assert code in ((0, 1, 2) if command.startswith("analyze") else (1,))
    assert told in out + errors


@pytest.mark.parametrize("value", ["x", "0", "-1", "1.5"])
def test_numbers_of_a_launch(monkeypatch, value) -> None:
    pytest.importorskip("torch")
    from kohya_bucket.latents.encode.precompute import launched

    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(KohyaBucketError, match=r"WORLD_SIZE is '.*' in the environment.*unset it"):
        launched()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(KohyaBucketError, match="RANK is '2'"):
        launched()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-crop", "10%"], "--max-crop is '10%'"),
        (["--min-bucket-reso", "1e9"], "--min-bucket-reso is '1e9'"),
        (["--min-bucket-reso", "5000"], "--min-bucket-reso 5000"),
        (["--min-bucket-reso", "-3"], "--min-bucket-reso is -3"),
        (["--min-bucket-reso", "10"], "--min-bucket-reso is 10"),
        (["--max-bucket-reso", "0"], "--max-bucket-reso is 0"),
        (["--focus", "boxes.jsonl"], "--focus is 'boxes.jsonl', but a size has no name to look for in a file"),
    ],
)
def test_a_value_that_cannot_be_is_named_as_it_was_given(command_line, arguments, message):
    code, out, errors = command_line("simulate", "640x480", *arguments)
    assert (code, out, message in errors) == (2, "", True)
    assert len(errors.splitlines()) == 1


def test_a_command_ends_with_1_where_a_storage_does_not_answer(command_line, monkeypatch):
    def silent(*_):
        raise StorageError("s3://bucket does not answer")

    monkeypatch.setattr("kohya_bucket.cli.commands.cache._open", silent)
    code, _, errors = command_line("cache", "status", "s3://bucket/latents")
    assert (code, errors) == (1, "kohya-bucket: s3://bucket does not answer\n")


_UNKNOWN = [f"keep_tokenz_{i}" for i in range(3000)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sd.toml", "[[datasets]]\n{toml}[[datasets.subsets]]\nimage_dir = 'data'\n"),
        ("musubi.toml", "[[datasets]]\nimage_directory = 'data'\ncache_directory = 'cache'\n{toml}"),
        ("job.yaml", "job: extension\nconfig:\n  process:\n  - datasets:\n    - {{folder_path: data, {yaml}}}\n"),
    ],
)
def test_thousands_of_unknown_keys_are_counted_and_not_compared(folder, command_line, monkeypatch, name, text):
    monkeypatch.chdir(folder.parent)
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    calls = []
    near = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda *args: calls.append(args) or near(*args))
    lines = {"toml": "".join(f"{key} = 1\n" for key in _UNKNOWN), "yaml": ", ".join(f"{key}: 1" for key in _UNKNOWN)}
    Path(name).write_text(text.format(**lines), encoding="utf-8")
    _, out, _ = command_line("plan", name, "--json")
    found = [one for one in json.loads(out)["findings"] if one["code"].startswith("unknown-key")]
    rest = next((one["message"] for one in found if one["code"] == "unknown-keys"), "0 more keys")
    counted = sum(one["count"] for one in found if one["code"] == "unknown-key")
    assert counted + int(rest.split()[0].replace(",", "")) == len(_UNKNOWN)
    assert len(calls) <= 300
