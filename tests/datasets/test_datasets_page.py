"""What docs/tutorial-loop.md shows runs as printed."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from kohya_bucket import BucketBatchSampler, cli
from tests.pictures import make_pictures

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial-loop.md").read_text(encoding="utf-8")


def block(language: str, word: str) -> str:
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL) if word in text]
    return str(found)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (90, 60)).save(folder / "a.jpg", exif=exif)
    Image.new("RGB", (70, 80)).save(folder / "b.jpg", "PNG")
    (folder / "c.jpg").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    return folder


def test_sizes(data: Path) -> None:
    names = {"paths": sorted(data.glob("*.jpg"))}
    exec(compile(block("python", "read_sizes"), "docs/tutorial-loop.md", "exec"), names)
    scan = names["scan"]
    assert scan.sizes.tolist() == [[90, 60], [70, 80], [0, 0]]
    assert [(i, Path(path).name) for i, path, _ in scan.failures] == [(2, "c.jpg")]
    assert scan.rotated().tolist() == [0]
    assert [(i, what) for i, _, what in scan.mislabelled()] == [(1, "named as JPEG, but holds PNG")]


@given(st.lists(st.tuples(st.integers(-1, 2), st.sampled_from([(), (64, 64), (64, 96)])), min_size=1, max_size=60))
def test_what_else_must_be_alike(images: list[tuple[int, tuple[int, ...]]]) -> None:
    """No batch mixes them, and each image with a bucket is trained once."""
    dataset = SimpleNamespace(bucket_indices=np.array([k for k, _ in images]))
    names = {
        "dataset": dataset,
        "control_sizes": [sizes for _, sizes in images],
        "BucketBatchSampler": BucketBatchSampler,
    }
    exec(compile(block("python", "control_sizes"), "docs/tutorial-loop.md", "exec"), names)
    batches = list(names["sampler"])
    assert all(len({images[i] for i in batch}) == 1 for batch in batches)
    assert sorted(i for batch in batches for i in batch) == [i for i, (k, _) in enumerate(images) if k >= 0]


def test_commands(data: Path) -> None:
    said = []
    for line in block("bash", "cache sizes").splitlines():
        program, *arguments = line.partition("#")[0].split()
        assert program == "kohya-bucket"
        said.append(CliRunner().invoke(cli.app, arguments).stdout)
    assert "3 new" in said[0]
    assert "2 unchanged" in said[1]


@pytest.mark.slow
def test_the_program_that_saves_its_state_goes_on_with_the_next_image(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    paths = make_pictures(tmp_path / "data", [(96, 64), (64, 96), (80, 80)] * 7, caption="a picture")
    program = block("python", "accelerator.load_state").replace("% 500", "% 3").replace("epoch < 10", "epoch < 2")
    program = program.replace('KohyaBuckets.for_arch("sdxl")', "KohyaBuckets(64, 32, 128, 32)")
    told = '        print("trained", *(Path(path).name for path in batch["path"]))\n'
    told += "        if steps == {}: raise SystemExit(3)\n"
    line = "        steps += 1\n"
    assert program.count(line) == 1
    batches = []
    for stop, code in ((8, 3), (-1, 0)):  # first stopped in mid-epoch, two steps after it was saved last
        (tmp_path / "train.py").write_text(program.replace(line, line + told.format(stop)), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, "ACCELERATE_USE_CPU": "true"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        batches.append([row.split()[1:] for row in done.stdout.splitlines() if row.startswith("trained ")])
    saved, rest = batches[0][:6], batches[1]
    assert len(batches[0]) == 8
    assert Counter(name for batch in (*saved, *rest) for name in batch) == {path.name: 2 for path in paths}
