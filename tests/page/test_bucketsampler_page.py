"""Every snippet and command of bucketsampler's page, run as it stands in bucketsampler_page.md."""

import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toml
import torch
from PIL import Image
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import kohya_bucket.bucketsampler as bucketsampler
from kohya_bucket import BucketBatchSampler, BucketedDataset, FixedBuckets, __version__, cli, load_preset
from kohya_bucket.buckets import Bucket, load_from_json, load_from_toml
from tests.pictures import spoil

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("bucketsampler_page.md").read_text(encoding="utf-8")
BLOCKS = {
    (kind, name): text
    for kind, name, text in re.findall(r"<!-- (snippet|commands|file): (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
}
SIZES = [(160, 120), (120, 160), (150, 150), (200, 100)]
COUNT = 14


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with images in data/ and a stand-in for the hub."""
    data = tmp_path / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        width, height = SIZES[int(rng.integers(len(SIZES)))]
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(data / f"{i:02d}.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(name: str, split: str, streaming: bool = False) -> Any:
        assert (name, split) == ("lambdalabs/pokemon-blip-captions", "train")
        paths = sorted(str(path) for path in (place / "data").glob("*.jpg"))
        features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
        rows = {"image": paths, "text": [f"creature {i}" for i in range(len(paths))]}
        hf = datasets.Dataset.from_dict(rows, features=features)
        return hf.to_iterable_dataset() if streaming else hf

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def run_snippet(name: str, **given: Any) -> dict[str, Any]:
    names = {"__name__": "snippet", **given}
    exec(compile(BLOCKS["snippet", name], f"bucketsampler_page.md#{name}", "exec"), names)
    return names


def run_commands(name: str) -> list[str]:
    """Run each line of a block; the output of each, also of what the line sends to a file."""
    outputs = []
    for line in BLOCKS["commands", name].splitlines():
        command, _, target = line.partition(" > ")
        program, *arguments = shlex.split(command)
        assert program == "kohya-bucket"
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 0, (line, done.output, done.exception)
        outputs.append(done.stdout)
        if target:
            Path(target).write_text(done.stdout, encoding="utf-8")
    return outputs


def quickstart_dataset() -> BucketedDataset:
    return BucketedDataset(paths=sorted(Path("data").glob("*.jpg")), rule=FixedBuckets(load_preset("sdxl")))


def test_quickstart(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    names = run_snippet("quickstart")
    seen = list(names["loader"])
    assert sorted(path for batch in seen for path in batch["path"]) == sorted(str(p) for p in names["paths"])
    for batch in seen:
        assert len({tuple(image.shape) for image in batch["image"]}) == 1
        assert isinstance(batch["bucket"], list)
        assert all(isinstance(bucket, Bucket) for bucket in batch["bucket"])
        assert batch["image"].shape == (len(batch["bucket"]), 3, batch["bucket"][0].height, batch["bucket"][0].width)
        assert batch["bucket"][0] in names["rule"].bucket_set


def test_unchanged(place: Path) -> None:
    names = run_snippet("unchanged")
    dataset, images = names["dataset"], names["images"]
    assert dataset.strategy is names["strategy"]
    assert (images.shape[0], images.shape[1]) == (4, 3)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    assert "caption" not in names["batch"]
    assert dataset.bucket_indices.dtype == np.int64
    assert [len(batch) for batch in names["sampler"]] == [4] * len(names["sampler"])
    assert bucketsampler.dims_from_cache(names["paths"], names["cache"]).tolist() == dataset.sizes.tolist()
    again = pickle.loads(pickle.dumps(dataset))  # as worker processes are given it
    assert again[3]["image"].equal(dataset[3]["image"])
    row = next(iter(names["cache"]))
    assert row.size_bytes == Path(row.path).stat().st_size
    again = bucketsampler.MetadataCache([row])
    again.upsert_many([row])
    assert [one.size_bytes for one in again] == [row.size_bytes]
    resize = bucketsampler.BucketResize(Bucket(64, 32), resample=Image.Resampling.LANCZOS)
    assert resize(Image.new("RGB", (200, 90), "white")).unique().tolist() == [1.0]


def test_a_strategy_of_ones_own(place: Path) -> None:
    class Last:
        bucket_set = bucketsampler.BucketSet.from_dims([(64, 64), (128, 64)])

        def assign(self, width: int, height: int) -> Bucket:
            return self.bucket_set[-1]

        def assign_many_indices(self, dims: Any) -> Any:
            return np.full(len(dims), 1)

    spoil(Path("data/00.jpg"))
    assert isinstance(Last(), bucketsampler.Strategy)
    dataset = bucketsampler.BucketedDataset(sorted(Path("data").glob("*.jpg")), Last(), captions=["a"] * COUNT)
    assert dataset.bucket_indices.tolist() == [-1] + [1] * (COUNT - 1)
    assert (dataset[1]["image"].shape, dataset[1]["caption"]) == ((3, 64, 128), "a")


def test_what_that_package_alone_names() -> None:
    bucket = Bucket(1024, 512)
    assert bucketsampler.log_ar_distance(100, 100, bucket) == pytest.approx(np.log(2))
    assert bucketsampler.resize_to_bucket_dims(3000, 1000, bucket) == ((1536, 512), (256, 0))
    for wrong in (lambda: Bucket(0, 1), lambda: bucketsampler.BucketSet.from_dims([])):
        with pytest.raises(bucketsampler.InvalidBucketError):
            wrong()
    for sizes in ([], [(8, 8), (8, 8)]):
        with pytest.raises((bucketsampler.EmptyBucketSetError, bucketsampler.DuplicateBucketError)):
            bucketsampler.BucketSet.from_dims(sizes)
    with pytest.raises(bucketsampler.DuplicateBucketError) as twice:
        bucketsampler.BucketSet.from_dims([(8, 8), (16, 8), (8, 8)])
    assert twice.value.duplicates == [(8, 8)]
    with pytest.raises(bucketsampler.InvalidBucketError) as wrong:
        Bucket(0, 512)
    assert (wrong.value.width, wrong.value.height) == (0, 512)
    with pytest.raises(bucketsampler.PresetNotFoundError, match="sdxl") as refused:
        bucketsampler.load_preset("sdx")
    assert (refused.value.name, refused.value.available) == ("sdx", sorted(bucketsampler.list_presets()))
    with pytest.raises(bucketsampler.BucketSamplerError):
        bucketsampler.log_ar_distance(0, 1, bucket)
    for name in bucketsampler.__all__:
        assert getattr(bucketsampler, name) is not None


@pytest.mark.parametrize(("read", "text"), [("load_from_toml", "buckets = 3"), ("load_from_json", "[]")])
def test_a_file_that_holds_no_bucket_set(tmp_path: Path, read: str, text: str) -> None:
    (tmp_path / "set").write_text(text, encoding="utf-8")
    with pytest.raises(bucketsampler.InvalidPresetError) as refused:
        getattr(bucketsampler, read)(tmp_path / "set")
    assert refused.value.source == tmp_path / "set"
    assert str(refused.value) == refused.value.reason
    with pytest.raises(FileNotFoundError):
        getattr(bucketsampler, read)(tmp_path / "none")


@pytest.mark.further
def test_huggingface(hub: None) -> None:
    dataset = run_snippet("huggingface")["dataset"]
    assert len(dataset) == COUNT
    assert dataset[3]["caption"] == "creature 3"


@pytest.mark.further
def test_streaming(hub: None) -> None:
    names = run_snippet("streaming")
    assert names["stream"].counts.trained == COUNT


def test_ddp(place: Path) -> None:
    dataset = quickstart_dataset()
    per_rank = []
    for rank in range(2):
        names = run_snippet(
            "ddp", dataset=dataset, BucketBatchSampler=BucketBatchSampler, DataLoader=DataLoader, world_size=2,
            rank=rank, num_epochs=1,
        )  # fmt: skip
        names["sampler"].set_epoch(0)
        per_rank.append(list(names["sampler"]))
    assert len(per_rank[0]) == len(per_rank[1])
    assert sorted(index for steps in per_rank for batch in steps for index in batch) == list(range(COUNT))


def test_auto_buckets(place: Path) -> None:
    names = run_snippet("auto-buckets", paths=sorted(Path("data").glob("*.jpg")))
    assert 0 < len(names["rule"].bucket_set) <= 8
    assert names["rule"].place(names["dims"]).placed.all()


def test_custom_buckets(place: Path) -> None:
    Path("my_buckets.toml").write_text(BLOCKS["file", "my_buckets.toml"], encoding="utf-8")
    rule = run_snippet("custom-buckets")["rule"]
    assert [str(bucket) for bucket in rule.bucket_set] == ["768x768", "896x640", "640x896"]
    assert (rule.bucket_set.name, rule.bucket_set.vae_factor) == ("my-budget", 8)

    rows = [{"width": b.width, "height": b.height} for b in rule.bucket_set]
    Path("my_buckets.json").write_text(json.dumps({"name": "my-budget", "vae_factor": 8, "buckets": rows}), "utf-8")
    assert list(load_from_json("my_buckets.json")) == list(rule.bucket_set)


def test_sizes_build(place: Path) -> None:
    built, refreshed = run_commands("sizes-build")
    assert f"{COUNT} new" in built
    assert f"{COUNT} unchanged, 0 read again" in refreshed


def test_metadata_cache(place: Path) -> None:
    run_commands("sizes-build")
    for path in Path("data").glob("*.jpg"):
        spoil(path)
    names = run_snippet("metadata-cache", image_paths=sorted(Path("data").glob("*.jpg")))
    assert len(names["dataset"]) == COUNT


def test_analyze(place: Path) -> None:
    run_commands("analyze")
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert str(COUNT) in json.dumps(report)
    assert Path("report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


def test_notebook(place: Path) -> None:
    names = run_snippet("notebook", image_paths=sorted(Path("data").glob("*.jpg")))
    assert len(names["dims"]) == COUNT
    assert names["plan"].samples == COUNT


def test_buckets_make(place: Path) -> None:
    (output,) = run_commands("buckets-make")
    assert "sdxl" in output
    rule = FixedBuckets(load_from_toml("my_buckets.toml"))
    assert 0 < len(rule.bucket_set) <= 8
    assert rule.place(SIZES).placed.all()


class TinyVAE:
    """Stands in for a VAE: the mean of 8x8 pixels."""

    downsample_factor, latent_channels, scale_factor, fingerprint = 8, 4, 0.13025, "tiny"

    def encode(self, pixels: Any) -> Any:
        return torch.nn.functional.avg_pool2d(pixels[:, [0, 1, 2, 0]], 8) * self.scale_factor


def test_precompute_and_train_on_latents(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kohya_bucket.latents.vae import diffusers_vae

    asked = []
    monkeypatch.setattr(diffusers_vae, "load_encoder", lambda name, **_: asked.append(name) or TinyVAE())
    run_commands("precompute")
    assert asked == ["stabilityai/sdxl-vae"]
    names = run_snippet("latents")
    assert len(names["dataset"]) == COUNT
    seen = 0
    for batch in names["loader"]:
        bucket = batch["bucket"][0]
        assert batch["latents"].shape == (len(batch["bucket"]), 4, bucket.height // 8, bucket.width // 8)
        seen += len(batch["bucket"])
    assert seen == COUNT


def test_latents_by_that_packages_names(place: Path) -> None:
    rule = bucketsampler.FixedBuckets(bucketsampler.load_preset("sd15"))
    images = bucketsampler.BucketedDataset(sorted(Path("data").glob("*.jpg"))[:3], rule)
    made = {}
    for folder, normalize in (("usual", None), ("same", lambda x: x * 2 - 1), ("dark", torch.zeros_like)):
        bucketsampler.precompute_latents(
            images, TinyVAE(), output_dir=folder, batch_size=2, dtype=torch.float32, pixel_normalize=normalize
        )
        made[folder] = bucketsampler.BucketedLatentDataset(folder)
        assert made[folder].bucket_indices.dtype == np.int64
    for usual, same, dark in zip(*made.values(), strict=True):
        torch.testing.assert_close(usual["latents"], same["latents"])
        assert not dark["latents"].any()
    moved = bucketsampler.BucketedLatentDataset("usual", map_location="meta")
    assert {item["latents"].device.type for item in moved} == {"meta"}


@pytest.mark.long
def test_custom_vae(place: Path) -> None:
    pool = torch.nn.AvgPool2d(8)
    run_snippet("custom-vae", dataset=quickstart_dataset(), my_model=lambda pixels: pool(pixels[:, [0, 1, 2, 0]]))
    assert len(run_snippet("latents")["dataset"]) == COUNT


def test_buckets_list(place: Path) -> None:
    shown, as_json = run_commands("buckets-list")
    for name in ("sdxl", "sd15", "novelai"):
        assert name in shown
        assert name in json.dumps(json.loads(as_json))


def test_help_and_version(place: Path) -> None:
    help_text, version = run_commands("version")
    for command in ("analyze", "sizes", "version"):
        assert command in help_text
    assert version.strip() == __version__


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("[!_]*.py")))
def test_examples(name: str, tmp_path: Path) -> None:
    for start, package in (("hf_", "datasets"), ("accelerate_", "accelerate")):
        if name.startswith(start):
            pytest.importorskip(package)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def test_the_extras_of_the_page() -> None:
    project = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = re.findall(r'^pip install "?\.(?:\[(\w+)\])?"?', BLOCKS["commands", "install"], re.MULTILINE)
    assert asked == ["", "torch", "hf", "cache", "vae", "analyze"]
    brings = {extra: " ".join(extras[extra]) for extra in asked if extra}
    assert not any("torch" in line for line in project["dependencies"])
    for extra, what in {"torch": "torch", "hf": "datasets", "cache": "[parquet]", "vae": "[train]"}.items():
        assert what in brings[extra]
    assert "pyarrow" in " ".join(extras["parquet"])
    assert "diffusers" in " ".join(extras["train"])


def test_every_block_of_the_page_is_run() -> None:
    """What the page shows is tagged, and each tag is run by a test."""
    assert len(re.findall(r"^```\w+$", PAGE, re.MULTILINE)) == len(BLOCKS)
    source = Path(__file__).read_text(encoding="utf-8")
    run = set(re.findall(r'run_(snippet|commands)\(\s*"([\w-]+)"', source))
    run |= set(re.findall(r'BLOCKS\["(\w+)", "([\w.-]+)"\]', source))
    assert set(BLOCKS) <= run
