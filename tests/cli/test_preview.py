"""`kohya_bucket.preview`, and the schema of `plan --json`."""

import functools
import json
from importlib.resources import files

import pytest
from PIL import Image
from typer.testing import CliRunner

import kohya_bucket
from kohya_bucket.cli import app
from kohya_bucket.errors import KohyaBucketError
from tests.pictures import make_pictures

SCHEMA = json.loads(files("kohya_bucket.cli").joinpath("plan.schema.json").read_text(encoding="utf-8"))
_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}
_KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "type", "required", "properties", "const", "enum", "items",
    "minimum", "maximum", "minItems", "maxItems", "dependentRequired",
}  # fmt: skip


def mistakes(value, schema=SCHEMA, where="$"):
    """Where `value` is not as the schema says; knows what the schema uses of JSON Schema."""
    assert schema.keys() <= _KNOWN
    found = []
    if "$ref" in schema:
        found += mistakes(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], where)
    names = schema.get("type", list(_TYPES))
    kinds = tuple(_TYPES[name] for name in ([names] if isinstance(names, str) else names))
    if "type" in schema and (isinstance(value, bool) or not any(isinstance(value, kind) for kind in kinds)):
        return [*found, f"{where}: {value!r} is not a {names}"]
    if ("const" in schema and value != schema["const"]) or value not in schema.get("enum", [value]):
        found.append(f"{where}: {value!r}")
    if isinstance(value, (int, float)) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{where}: {value}")
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{where}: {len(value)} items")
        for k, one in enumerate(value):
            found += mistakes(one, schema.get("items", {}), f"{where}[{k}]")
    if isinstance(value, dict):
        needed = [*schema.get("required", ())]
        needed += [n for key, names in schema.get("dependentRequired", {}).items() if key in value for n in names]
        found += [f"{where}: no {name}" for name in needed if name not in value]
        for name, one in value.items():
            found += mistakes(one, schema.get("properties", {}).get(name, {}), f"{where}.{name}")
    return found


SIZES = [(300, 200), (200, 300), (256, 256), (400, 100), (310, 205)]


@pytest.fixture
def folder(tmp_path):
    make_pictures(tmp_path / "images", SIZES, caption="caption")
    return tmp_path / "images"


def config(folder, **dataset):
    keys = {"resolution": 256, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 128} | dataset
    return {"datasets": [keys | {"subsets": [{"image_dir": str(folder), "num_repeats": 2}]}]}


def test_a_preview_is_what_plan_prints(folder, tmp_path):
    file = tmp_path / "dataset.json"
    file.write_text(json.dumps(config(folder)), encoding="utf-8")
    printed = json.loads(CliRunner().invoke(app, ["plan", str(file), "--images", "--json", "--gpus", "2"]).stdout)
    found = kohya_bucket.preview(file, gpus=2)
    assert json.loads(json.dumps(found.data)) == printed
    assert mistakes(printed) == []
    assert found.steps == printed["gpus"][0]["steps"]
    assert sum(bucket.samples for bucket in found.buckets) == 2 * len(SIZES)
    names = [name for bucket in found.buckets for name in bucket.files]
    assert sorted(names) == sorted(str(folder / f"{k}.png") for k in range(len(SIZES)))
    for bucket, row in zip(found.buckets, printed["datasets"][0]["buckets"], strict=True):
        assert (list(bucket.size), len(bucket.files)) == (row["bucket"], row["images"])
    of_dict = kohya_bucket.preview(config(folder), gpus=2)
    assert (of_dict.buckets, of_dict.steps) == (found.buckets, found.steps)


def test_a_preview_has_the_crops_of_a_focus(folder):
    (folder / "3.focus.json").write_text("[0, 0, 0.1, 1]", encoding="utf-8")
    found = kohya_bucket.preview(config(folder, max_bucket_reso=256) | {"kohya_bucket": {"focus": "beside"}})
    assert mistakes(json.loads(json.dumps(found.data))) == []
    (entry,) = found.data["datasets"]
    assert entry["focus"] == [{"rectangles": 1, "cut_in_middle": 1, "cut": 0}]
    (row,) = [row for row in entry["image_rows"] if row["key"] == str(folder / "3.png")]
    assert row["cut"][0] == 0 < row["cut"][2]


def test_what_mends_an_image_lets_it_train(folder):
    Image.new("RGB", (300, 20)).save(folder / "thin.png")
    keys = {"bucket_no_upscale": True, "bucket_reso_steps": 64}
    (row,) = kohya_bucket.preview(config(folder, **keys)).not_trained
    assert row.file == str(folder / "thin.png")
    assert row.mend
    after = kohya_bucket.preview(config(folder, **keys | row.mend))
    assert after.not_trained == ()
    assert any(row.file in bucket.files for bucket in after.buckets)


def test_what_cannot_be_read_has_no_number(folder):
    (folder / "broken.png").write_bytes(b"no image")
    (row,) = kohya_bucket.preview(config(folder)).not_trained
    assert (row.dataset, row.mend) == (1, {})


def test_a_config_with_a_mistake_has_errors_and_no_buckets(folder):
    found = kohya_bucket.preview(config(folder, resolution="large"))
    assert (found.steps, found.buckets) == (0, ())
    assert found.errors
    assert mistakes(json.loads(json.dumps(found.data))) == []


def test_data_sets_keep_their_numbers_where_one_with_a_mistake_is_not_planned(folder):
    second = config(folder)["datasets"]
    seen = kohya_bucket.preview({"datasets": [*config(folder, validation_split=20.0)["datasets"], *second]})
    assert seen.errors
    assert {bucket.dataset for bucket in seen.buckets} == {2}
    assert [one["number"] for one in seen.data["datasets"]] == [2]
    assert mistakes(json.loads(json.dumps(seen.data))) == []


_DEEP = functools.reduce(lambda inner, _: [inner], range(5000), [])


@pytest.mark.parametrize(
    ("given", "word"),
    [("no.toml", "no.toml"), (7, "7"), ({}, "datasets"), ({"datasets": object()}, "object"),
     ({"datasets": _DEEP}, "config")],
    ids=["missing", "number", "empty", "object", "deep"],
)  # fmt: skip
def test_what_is_no_config(given, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        said = " ".join(kohya_bucket.preview(given).errors)
    except KohyaBucketError as error:
        said = str(error)
    assert word in said


def test_a_key_that_resembles_another_is_said_with_it(folder):
    with pytest.raises(KohyaBucketError, match="no key 'resolutoin': did you mean 'resolution'"):
        kohya_bucket.preview({"resolutoin": 1})
    data = [{"resolutoin": 256, "subsets": [{"image_dir": str(folder), "caption_extension": ".txt"}]}]
    (error,) = kohya_bucket.preview({"datasets": data}).errors
    assert error.endswith("did you mean 'resolution'? It is read as that here")


def test_musubi_tuners_configs(folder):
    for k in range(len(SIZES)):
        (folder / f"{k}.txt").write_text("caption", encoding="utf-8")
    keys = {"resolution": [256, 256], "caption_extension": ".txt", "batch_size": 2, "enable_bucket": True}
    found = kohya_bucket.preview({"datasets": [keys | {"image_directory": str(folder)}]})
    assert found.errors == ()
    assert mistakes(json.loads(json.dumps(found.data))) == []
    assert sum(len(bucket.files) for bucket in found.buckets) == len(SIZES)
    assert found.steps == sum(bucket.batches for bucket in found.buckets)
