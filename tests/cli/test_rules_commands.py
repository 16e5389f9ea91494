"""presets, chart, compare and buckets make from the outside."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from kohya_bucket import list_presets
from kohya_bucket.buckets import load_from_toml
from kohya_bucket.cli import app
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import MetadataCache
from tests.command_line import command_line
from tests.pictures import make_pictures

__all__ = ["command_line"]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    data = tmp_path / "data"
    make_pictures(data, rng.integers(200, 900, (20, 2)).tolist())
    (data / "broken.jpg").write_bytes(b"no image")
    return data


def test_buckets_list() -> None:
    data = json.loads(run("buckets", "list", "--json"))
    assert list(data) == list_presets()
    assert data["sdxl"]["n_buckets"] == len(data["sdxl"]["buckets"]) == 9
    assert data["sdxl"]["buckets"][1] == [1152, 896]
    text = run("buckets", "list")
    assert "The nine SDXL sizes" in text
    assert "qwen-image  (7 buckets, multiples of 16)" in text
    assert "    1328x1328 1664x928" in text


def test_compare(folder) -> None:
    text = run("compare", folder, "--rules", "kohya,novelai,exact,auto", "--resolution", 512)
    assert "20 images" in text
    assert "(1 unreadable left out)" in text
    data = json.loads(run("compare", folder, "--rules", "all", "--resolution", "512", "--json", "-b", 4))
    assert (data["images"], data["unreadable"], data["batch_size"]) == (20, 1, 4)
    assert {"kohya", "kohya-largest", "onetrainer", "diffusers"} <= {r["rule"] for r in data["rules"]}
    bounded = json.loads(run("compare", folder, "--rules", "kohya", "--max-crop", 0.01, "--json"))["rules"][0]
    assert bounded["worst_crop"] <= 0.01
    assert sum(bounded["reasons"].values()) == bounded["unplaced"] > 0
    assert "crop off more than the limit" in run("compare", folder, "--rules", "kohya", "--max-crop", 0.01)


def test_commands_take_one_table_of_sizes_or_say_who_does(tmp_path, command_line) -> None:
    rows = {"id": [1, 2, 3], "width": [640, 512, None], "height": [480, 768, 640]}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("id,width,height\n1,640,480\n2,512,768\n3,,640\n", encoding="utf-8")
    entries = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    (tmp_path / "t.json").write_text(json.dumps(entries), encoding="utf-8")
    for ending in ("csv", "json", "parquet"):
        table = tmp_path / f"t.{ending}"
        for command in (("compare", table), ("buckets", "make", table)):
            code, out, _ = command_line(*command)
            assert (code, "2 images of" in out, "(1 without a size left out)" in out) == (0, True, True)
        code, out, err = command_line("analyze", table, "--json")
        (data,) = json.loads(out)["datasets"]
        assert (code, data["images"]["found"], data["images"]["broken"]) == (0, 2, 0)
        assert "1 image of " in err
        assert "left out: without a size" in err
        assert command_line("analyze", table, "--decode")[::2] == (
            2, f"kohya-bucket: {table}: of images in a table there are only sizes: leave out --decode\n",
        )  # fmt: skip
        for command in (
            ("explore", table, "-o", tmp_path / "x.html"), ("cache", "sizes", table, "-o", tmp_path / "s.parquet"),
        ):  # fmt: skip
            code, out, err = command_line(*command)
            assert (code, out) == (2, "")
            assert "is a table, not an image: `compare`, `analyze` and `buckets make` take one table of sizes" in err
            assert len(err.splitlines()) == 1
    code, _, err = command_line(
        "precompute", tmp_path / "t.csv", "--arch", "sd", "-o", tmp_path / "store", "--vae", "x"
    )
    assert (code, "is a table, not an image" in err) == (2, True)


def test_each_number_of_gpus_is_compared_as_if_it_were_asked_for_alone(folder) -> None:
    rules = "compare", folder, "--rules", "kohya,novelai", "--gpus"
    both = json.loads(run(*rules, "1,2", "--json"))
    assert both == [json.loads(run(*rules, gpus, "--json")) for gpus in ("1", "2")]
    assert [of_one["gpus"] for of_one in both] == [1, 2]
    assert run(*rules, "1,2") == run(*rules, "1") + run(*rules, "2")


def test_a_table_stands_for_its_images(folder, tmp_path) -> None:
    cache = tmp_path / "cache.parquet"
    MetadataCache.build([str(p) for p in sorted(folder.glob("*"))]).save(cache)
    one, other = (json.loads(run("compare", source, "--json", "--rules", "exact")) for source in (folder, cache))
    assert one == other


def test_clips_beside_images_are_left_out_with_a_word(tmp_path) -> None:
    Image.new("RGB", (600, 400)).save(tmp_path / "a.png")
    (tmp_path / "b.mp4").write_bytes(b"a clip")
    result = CliRunner().invoke(app, ["compare", str(tmp_path), "--rules", "kohya"])
    assert "1 clip left out: only images are compared" in result.stderr
    assert result.stdout.startswith("1 image of")


def test_buckets_make(folder, tmp_path) -> None:
    output = tmp_path / "my.toml"
    text = run("buckets", "make", folder, "--num", 4, "--target", 512, "--compare-to", "sd15", "--output", output)
    assert "Generated 4 buckets (requested 4, k-means converged in" in text
    assert "Mean crop loss (auto)" in text
    assert "Mean crop loss (sd15)" in text
    assert f"Wrote bucket set to {output}" in text.replace("\n", " ").replace("  ", " ")
    assert len(load_from_toml(output)) == 4
    best = json.loads(run("buckets", "make", folder, "-n", 4, "-t", 512, "--method", "optimal",
                          "--compare-to", output, "--json"))  # fmt: skip
    assert all(b["width"] * b["height"] >= 0.75 * 512 * 512 for b in best["buckets"])
    assert best["readable"] == 20
    assert best["broken"] == 1
    assert all(b["width"] * b["height"] <= 512 * 512 for b in best["buckets"])


def test_chart(folder, tmp_path) -> None:
    text = run("buckets", "chart", "--resolution", 512)
    assert "576x448" in text
    assert "1.4762" in text
    assert "1.4516" in text
    svg = tmp_path / "chart.SVG"
    run("buckets", "chart", folder, "--resolution", 512, "--switching", "area", "--output", svg)
    assert "20 images" in svg.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["buckets", "chart", "--rule", "exact"], "no fixed set of buckets"),
        (["buckets", "chart", "--switching", "mean"], "switching is 'mean'"),
        (["buckets", "chart", "--output", "chart.pdf"], "drawn as .svg"),
        (["compare", "nowhere", "--rules", "kohya"], "nowhere"),
    ],
)
def test_mistakes_are_named(arguments, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((KohyaBucketError, OSError), match=message):
        run(*arguments)


def test_nothing_readable(tmp_path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(KohyaBucketError, match="none of its 1 images"):
        run("compare", tmp_path)
