"""Whatever a command deletes or overwrites is its own: files of others, of similar names, stay as they are."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.latents import precompute_latents
from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
from tests.latents.stub_encoders import MeanEncoder, dataset_of, make_images

NAMES = [
    "notes.txt",
    "model.safetensors",
    "64x64-float32-0123.safetensors",
    "64x64-float32-0123456789abcdef.safetensors.bak",
    "copy of 64x64-float32-0123456789abcdef.safetensors",
    "manifest-old.parquet",
    "manifest-00000000000000000001.parquet",
    "manifest-00000000000000000009-0123456789abcdef.parquet.bak",
    "store.json.bak",
    "sizes.parquet.bak",
    ".notes.tmp",
    ".notes.txt.0123456789ab.tmp",
    ".store.json.tmp",
    ".64x64-float32-0123456789abcdef.safetensors.backup.tmp",
    "x.claim",
    "me.alive",
    "img_000_0100x0060_sd.npz.bak",
    "img_000.npz.bak",
    "report.html.bak",
    "__init__.cpython-311.pyc.bak",
]
FOLDERS = (
    ".", "images", "store", "store/shards", "store/work", "store/.kohya_bucket_work", "copy", "npz", "checkout",
    "checkout/library", "checkout/library/__pycache__",
)  # fmt: skip


def strew(root: Path) -> dict[Path, bytes]:
    """Files of others in every folder, two days old."""
    found, old = {}, time.time() - 2 * 86400
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            path = root / folder / name
            path.write_bytes(f"{folder}/{name}".encode())
            os.utime(path, (old, old))
            found[path] = path.read_bytes()
    return found


def run(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


@pytest.mark.long
def test_files_of_others_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = make_images(tmp_path / "images", [(100, 60), (60, 100), (64, 64)])

    def encode(output: object) -> None:
        precompute_latents(dataset_of(paths), MeanEncoder(), output)

    steps: dict[str, Callable[[], object]] = {
        "shards": lambda: encode("store"),
        "npz beside the images": lambda: encode(NpzFiles("sd")),
        "npz elsewhere": lambda: encode(NpzFiles("sd", "npz")),
        "an image is gone": lambda: paths[0].unlink(),
        "prune": lambda: run("cache", "prune", "store", "--gone", "--stale", "--damaged", "--image-dir", "images"),
        "pack": lambda: run("cache", "pack", "store"),
        "pack into another folder": lambda: run("cache", "pack", "store", "--output", "copy"),
        "export": lambda: run("cache", "export", "store", "npz", "--arch", "sd"),
        "import": lambda: run("cache", "import", "images", "store", "--arch", "sd"),
        "sizes": lambda: run("cache", "sizes", "images", "--output", "sizes.parquet"),
        "report": lambda: run("analyze", "images", "--html", "report.html"),
        "page": lambda: run("explore", "images", "--output", "page.html"),
        "chart": lambda: run("chart", "images", "--output", "chart.svg"),
        "set": lambda: run("buckets", "make", "images", "--num", 2, "--output", "set.toml"),
    }
    strewn = strew(tmp_path)
    for step, work in steps.items():
        work()
        changed = [str(path) for path, data in strewn.items() if not path.is_file() or path.read_bytes() != data]
        assert changed == [], step
