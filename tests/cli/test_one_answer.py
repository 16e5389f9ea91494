"""The same images with the same options have one answer, whichever command is asked."""

import contextlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kohya_bucket import ConfigError
from kohya_bucket.cli import app
from tests.pictures import png_header
from tests.thinned import one_in

OWN_SET = "[[buckets]]\nwidth = 512\nheight = 768\n[[buckets]]\nwidth = 640\nheight = 512\n"
IMAGES = 9
Bucket = tuple[int, int] | None


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


class Case:
    """Random images and options; what each command makes of them."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = np.random.default_rng(seed)
        self.folder, self.table = folder / "data", folder / "sizes.csv"
        self.folder.mkdir()
        self.sizes = [(int(w), int(h)) for w, h in np.exp(rng.uniform(np.log(40), np.log(4000), (IMAGES, 2)))]
        for i, size in enumerate(self.sizes):
            (self.folder / f"{i}.png").write_bytes(png_header(*size))
        rows = "".join(f"{i},{w},{h}\n" for i, (w, h) in enumerate(self.sizes))
        self.table.write_text(f"id,width,height\n{rows}", encoding="utf-8")
        (folder / "own.toml").write_text(OWN_SET, encoding="utf-8")
        own = f"file:{folder / 'own.toml'}"
        rules = ("kohya", "kohya", "kohya", "novelai", "exact", "auto", "preset:sdxl", own)
        self.rule = rules[seed % len(rules)]
        width, height = (int(side) for side in rng.choice([448, 512, 640, 768, 1000], 2))
        keys: dict[str, Any] = {
            "resolution": [width, height],
            "min_bucket_reso": int(rng.choice([128, 200, 256, 320])),
            "max_bucket_reso": int(rng.choice([1024, 1100, 1536, 2048])),
            "bucket_reso_steps": int(rng.choice([32, 64])),
            "bucket_no_upscale": bool(rng.random() < 0.3),
        }
        table: dict[str, Any] = {"switching": str(rng.choice(["midpoint", "geometric", "area"]))}
        if rng.random() < 0.4:
            table["max_crop"] = float(rng.choice([0.02, 0.1, 0.3]))
        if self.rule == "exact":
            del table["switching"]  # it compares no aspects
        elif self.rule == "auto":
            table["num_buckets"] = int(rng.integers(1, 6))
            table["auto_method"] = str(rng.choice(["kmeans", "optimal"]))
        elif self.rule == "kohya" and keys["bucket_no_upscale"] and rng.random() < 0.5:
            table["no_upscale_fit"] = "largest"
        # what is left out has its default
        self.keys = {key: value for key, value in keys.items() if rng.random() < 0.8 or key == "resolution"}
        self.adapter = {key: value for key, value in table.items() if rng.random() < 0.8}
        if not self.keys.get("bucket_no_upscale"):
            self.adapter.pop("no_upscale_fit", None)  # refused with upscaling
        self.variant = {
            ("kohya", "largest"): "kohya-largest", ("auto", "optimal"): "auto-optimal",
        }.get((self.rule, self.adapter.get("no_upscale_fit") or self.adapter.get("auto_method")))  # fmt: skip
        self.config = self._written_config()

    def options(self, without: tuple[str, ...] = ()) -> list[str]:
        """As on a command line, with either spelling of names and sizes."""
        given = {**self.keys, **self.adapter, "resolution": "{}x{}".format(*self.keys["resolution"])}
        out = []
        for key, value in given.items():
            name = {"num_buckets": "--num"}.get(key, f"--{key}")
            if key not in (*without, "auto_method") and value is not False:
                out += [name] if value is True else [name.replace("_", "-"), str(value)]
        return out

    def simulate(self) -> list[Bucket]:
        """Bucket of each image."""
        found = []
        for width, height in self.sizes:
            options = self.options(without=("num_buckets",))
            (row,) = json.loads(run("simulate", f"{width}x{height}", "--rule", self.rule, *options, "--json"))
            found.append(row["bucket"] and (row["bucket"]["width"], row["bucket"]["height"]))
        return found

    def simulate_by_config(self, some: int) -> list[Bucket]:
        """Bucket of each of the first images."""
        found = []
        for width, height in self.sizes[:some]:
            (row,) = json.loads(run("simulate", f"{width}x{height}", "--config", self.config, "--json"))
            found.append(row["bucket"] and (row["bucket"]["width"], row["bucket"]["height"]))
        return found

    def _written_config(self) -> Path:
        config = self.folder.parent / "config.toml"
        table = {"rule": self.rule, **self.adapter}
        config.write_text(
            "[kohya_bucket]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
            + "[[datasets]]\nenable_bucket = true\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.keys.items())
            + f"[[datasets.subsets]]\nclass_tokens = 'x'\nimage_dir = '{self.folder}'\n",
            encoding="utf-8",
        )
        return config

    def plan(self) -> list[Bucket]:
        (dataset,) = json.loads(run("plan", self.config, "--json", "--images"))["datasets"]
        at = {Path(row["key"]).stem: tuple(row["bucket"]) for row in dataset["image_rows"]}
        return [at.get(str(i)) for i in range(IMAGES)]

    def analyze(self, *arguments: object) -> Counter[Bucket]:
        """Images of each bucket in use."""
        (data,) = json.loads(run("analyze", *arguments, "--json"))["datasets"]
        counts = Counter({(b["width"], b["height"]): b["images"] for b in data["buckets"] if b["images"]})
        return counts + Counter({None: data["images"]["without_bucket"]})

    def compare(self) -> dict[str, Any]:
        rule, options = self.variant or self.rule, self.options(without=("no_upscale_fit",))
        (row,) = json.loads(run("compare", self.table, "--rules", rule, *options, "--json"))["rules"]
        return row

    def precompute(self, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> list[Bucket]:
        """What would be encoded, in place of encoding it."""
        seen = []
        encoder = SimpleNamespace(fingerprint="stub", downsample_factor=8, latent_channels=4, scale_factor=1.0)
        report = SimpleNamespace(failed=[])
        monkeypatch.setattr("kohya_bucket.cli.encoding.load_vae", lambda *_, **__: encoder)
        take = lambda wanted, *_, **__: seen.append(wanted) or report  # noqa: E731
        monkeypatch.setattr("kohya_bucket.latents.encode.precompute.encode_items", take)
        monkeypatch.setattr("kohya_bucket.cli.encoding._print_report", lambda _: None)
        with contextlib.suppress(ConfigError):  # where no image has a bucket, there is nothing to encode
            run("precompute", *arguments, "--vae", "stub", "-o", self.folder.parent / "out")
        if not seen:
            return [None] * IMAGES
        (wanted,) = seen
        at = {Path(p).stem: (int(w), int(h)) for p, (w, h) in zip(wanted.paths, wanted.bucket_sizes, strict=True)}
        return [at.get(str(i)) for i in range(IMAGES)]


@pytest.mark.long
@pytest.mark.parametrize("seed", one_in(6, range(32)))
def test_one_image_has_one_answer(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(seed, tmp_path)
    planned = case.plan()
    by_options = [case.folder, "--rule", case.rule]
    assert case.precompute(monkeypatch, "--config", case.config) == planned
    assert case.analyze("--config", case.config) == Counter(planned)
    if case.variant != "auto-optimal":  # which is no option of these
        own_sizes = ("resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")
        options = case.options(without=own_sizes if ":" in case.rule else ())
        assert case.precompute(monkeypatch, *by_options, *options) == planned
        assert case.analyze(*by_options, *case.options()) == Counter(planned)
    if case.rule != "auto":  # which depends on all images
        assert case.simulate() == planned
        assert case.simulate_by_config(3) == planned[:3]
    row = case.compare()
    assert (row["buckets"], row["unplaced"]) == (len({*planned} - {None}), planned.count(None))


@pytest.mark.parametrize("seed", range(6))
def test_a_set_made_of_images_is_the_one_that_rule_auto_makes(seed: int, tmp_path: Path) -> None:
    case = Case(seed, tmp_path)
    options = [*case.options(without=("bucket_no_upscale", *case.adapter)), "--num", 2 + seed]
    made = json.loads(run("buckets", "make", case.table, *options, "--json"))["buckets"]
    (data,) = json.loads(run("analyze", case.folder, "--rule", "auto", *options, "--json"))["datasets"]
    assert [(b["width"], b["height"]) for b in made] == [(b["width"], b["height"]) for b in data["buckets"]]
    shown = run("buckets", "chart", case.table, "--rule", "auto", *options)
    assert f"{len(made)} buckets" in shown


@pytest.mark.long
@pytest.mark.parametrize("rule", ["kohya", "novelai", "preset:sdxl"])
@pytest.mark.parametrize("switching", [None, "midpoint", "geometric", "area"])
@pytest.mark.parametrize("keys", one_in(2, ["", "--resolution 832x1216 --max-bucket-reso 2048 --bucket-reso-steps 32"]))
def test_a_chart_shows_where_images_change_their_bucket(rule: str, switching: str | None, keys: str) -> None:
    options = ["--rule", rule, *(["--switching", switching] if switching else []), *keys.split()]
    rows = [line.split() for line in run("buckets", "chart", *options).splitlines()[2:]]
    assert rows
    for narrower, wider, aspect, _ in rows[:: max(1, len(rows) // 5)]:
        for factor, bucket in ((0.999, narrower), (1.001, wider)):
            (found,) = json.loads(run("simulate", f"{round(1e6 * factor * float(aspect))}x1000000", *options, "--json"))
            assert "{width}x{height}".format(**found["bucket"]) == bucket
