"""diffusers' own DreamBooth scripts (DIFFUSERS_DIR names a checkout) with the lines of `docs/coming-from.md`."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "coming-from.md"
BUCKETS = {(32, 32): 11, (24, 40): 7, (40, 24): 7, (16, 48): 8, (48, 16): 8}  # (height, width): images
COUNT = sum(BUCKETS.values())
ONCE = collections.Counter(range(COUNT))
SCRIPTS = ["flux2", "flux2_klein", "krea2", "qwen_image", "z_image", "flux_kontext"]
BATCHES_MADE_ONCE = {"z_image", "flux_kontext"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def diffusers():
    name = os.environ.get("DIFFUSERS_DIR")
    if not name:
        pytest.skip("DIFFUSERS_DIR is not set: no checkout of diffusers")
    for package in ("torch", "accelerate", "torchvision"):
        pytest.importorskip(package, reason=f"{package} is not installed here")
    return Path(name).resolve()


@pytest.fixture
def images(tmp_path):
    """Each of one colour, which is its number."""
    from PIL import Image

    (tmp_path / "images").mkdir()
    for i, (height, width) in enumerate(size for size, count in BUCKETS.items() for _ in range(count)):
        Image.new("RGB", (width, height), (i, i, i)).save(tmp_path / "images" / f"{i:02d}.png")
    return tmp_path / "images"


def run(diffusers, images, script, *, ours, batch=2, ranks=1, epochs=2, **args):
    """The steps of a run, each with a row for each process."""
    folder = images.parent / ("ours" if ours else "theirs")
    folder.mkdir(exist_ok=True)
    for file in folder.glob("*.json"):
        file.unlink()
    args = {
        "instance_data_dir": str(images), "train_batch_size": batch, "seed": 1, "repeats": 1, "resolution": 32,
        "dataloader_num_workers": 0, "gradient_accumulation_steps": 1, "output_dir": str(folder), "center_crop": True,
        "checkpointing_steps": 10**6, "num_train_epochs": epochs, **args,
    }  # fmt: skip
    path = diffusers / "examples" / "dreambooth" / f"train_dreambooth_lora_{script}.py"
    spec = {"script": str(path), "diffusers": str(diffusers), "args": args, "ours": ours, "buckets": list(BUCKETS)}
    spec |= {"page": str(PAGE), "out": str(folder), "epochs": epochs}
    told = images.parent / "spec.json"
    told.write_text(json.dumps(spec), encoding="utf-8")
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    command = [sys.executable, *several, str(HERE / "diffusers_script.py"), str(told)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("?.json"))]
    return list(zip(*rows, strict=True))


def epochs_of(steps):
    """Per epoch how often each image was trained."""
    found = collections.defaultdict(collections.Counter)
    for step in steps:
        for row in step:
            found[row["epoch"]].update(row["items"])
    return list(found.values())


def missed(counts):
    return sorted(set(range(COUNT)) - set(counts))


@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("script", SCRIPTS)
def test_images_of_an_epoch(diffusers, images, script, batch):
    """Theirs leaves out what fills no batch, in some scripts the same images each time; ours nothing."""
    theirs = [missed(counts) for counts in epochs_of(run(diffusers, images, script, ours=False, batch=batch))]
    assert [len(left_out) for left_out in theirs] == [{2: 3, 4: 9}[batch]] * 2
    assert (theirs[0] == theirs[1]) == (script in BATCHES_MADE_ONCE)
    ours = run(diffusers, images, script, ours=True, batch=batch, dataloader_num_workers=2)
    assert epochs_of(ours) == [ONCE, ONCE]
    assert max(len(row["items"]) for step in ours for row in step) == batch


@pytest.mark.parametrize("script", ["flux2", "flux_kontext"])
def test_an_epoch_on_two_processes(diffusers, images, script):
    ours = run(diffusers, images, script, ours=True, ranks=2)
    assert epochs_of(ours) == [ONCE, ONCE]


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("script", ["flux2", "flux_kontext"])
def test_a_run_that_is_resumed(diffusers, images, script, ranks, accumulation):
    """Stopped after 5 updates of the second epoch; theirs begins that epoch again, ours goes on."""
    for ours in (False, True):
        more = {"ours": ours, "ranks": ranks, "gradient_accumulation_steps": accumulation}
        whole = run(diffusers, images, script, epochs=3, **more)
        batches = [sum(step[0]["epoch"] == epoch for step in whole) for epoch in range(3)]
        assert len(set(batches)) == 1
        updates = -(-batches[0] // accumulation)
        stop = updates + 5
        begun = run(diffusers, images, script, max_train_steps=stop, checkpointing_steps=stop, **more)
        assert begun == whole[: batches[0] + 5 * accumulation]
        resumed = {"resume_from_checkpoint": "latest", "max_train_steps": 3 * updates}
        rest = run(diffusers, images, script, **resumed, **more)
        assert (begun + rest == whole) == ours
        second = epochs_of(begun + rest)[1]
        assert (second.keys() == ONCE.keys() and sum(second.values()) < COUNT + 2 * ranks) == ours
