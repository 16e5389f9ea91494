"""Epochs of the real musubi-tuner (MUSUBI_DIR names a checkout) with its door open, and a training of its Z-Image."""

import collections
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from recording import recorded

HERE = Path(__file__).resolve().parent
COUNT = 41
SIZES = [(1024, 1024), (1024, 768), (768, 1024), (1280, 720), (720, 1280), (1000, 600), (600, 1000)]
ONCE = dict.fromkeys(range(COUNT), 1)


@pytest.fixture(scope="session")
def checkout():
    name = os.environ.get("MUSUBI_DIR")
    if not name:
        pytest.skip("MUSUBI_DIR is not set: no checkout of musubi-tuner")
    source = Path(name).resolve() / "src"
    if not (source / "musubi_tuner").is_dir():
        pytest.fail(f"MUSUBI_DIR={name} is no musubi-tuner checkout")
    for package in ("torch", "accelerate", "safetensors", "einops", "toml", "av"):
        pytest.importorskip(package, reason=f"{package} is not installed here")
    return source


@pytest.fixture
def config(checkout, tmp_path):
    """A data set whose caches are there: every value of an item's latents and of its caption is its number."""
    import torch
    from PIL import Image
    from safetensors.torch import save_file

    (tmp_path / "images").mkdir()
    (tmp_path / "cache").mkdir()
    draws, place = random.Random(1), bucket_selector(checkout)
    for i in range(COUNT):
        width, height = draws.choice(SIZES)
        w, h = (side // 8 for side in place(width, height))
        Image.new("RGB", (width, height)).save(tmp_path / "images" / f"im{i:03d}.png")
        (tmp_path / "images" / f"im{i:03d}.txt").write_text(f"caption {i}", encoding="utf-8")
        latents = {f"latents_1x{h}x{w}_float32": torch.full((16, h, w), float(i))}
        save_file(latents, tmp_path / "cache" / f"im{i:03d}_{width:04d}x{height:04d}_{family(checkout)}.safetensors")
        embed = {"varlen_llm_embed_float32": torch.full((3 + i % 5, 32), float(i))}
        save_file(embed, tmp_path / "cache" / f"im{i:03d}_{family(checkout)}_te.safetensors")
    return write_config(tmp_path)


def trains_z_image(source):
    return (source / "musubi_tuner" / "zimage_train_network.py").is_file()


def family(source):
    """Z-Image, or Qwen-Image where a version does not have it."""
    return "zi" if trains_z_image(source) else "qi"


def bucket_selector(source):
    program = (
        "import json, sys; from musubi_tuner.dataset.image_video_dataset import BucketSelector; "
        f"place = BucketSelector((128, 128), True, False, '{family(source)}').get_bucket_resolution; "
        f"print(json.dumps([place(size) for size in {SIZES}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(source), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(zip(SIZES, json.loads(done.stdout.splitlines()[-1]), strict=True))
    return lambda width, height: found[width, height]


def write_config(folder, table="", **dataset):
    lines = [
        "[general]",
        "resolution = [128, 128]",
        "caption_extension = '.txt'",
        "batch_size = 2",
        "enable_bucket = true",
    ]
    lines += ["[[datasets]]", f"image_directory = '{folder / 'images'}'", f"cache_directory = '{folder / 'cache'}'"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in dataset.items()]
    file = folder / "dataset.toml"
    file.write_text("\n".join([*lines, table, ""]), encoding="utf-8")
    return file


def environment(source, **more):
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(source), str(HERE)]),
        "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", **more,
    }  # fmt: skip


def run(source, folder, spec, ranks=1, door=("-m", "kohya_bucket.launch"), code=0):
    """What the script says; it is run by the launcher unless `door` is empty."""
    file = folder / "spec.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *several, *door, str(HERE / "musubi_script.py"), str(file)]
    told = environment(source, RECORD_DIR=str(folder / "record"))
    done = subprocess.run(
        command, env=told, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=600
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr + done.stdout


def epochs(source, folder, config, ranks=1, workers=0, seed=None, count=2, timestep_buckets=None, **more):
    """Per epoch the steps, each with a row for each process."""
    out = folder / "rows"
    out.mkdir(exist_ok=True)
    for file in out.iterdir():
        file.unlink()
    spec = {"config": str(config), "seed": seed, "workers": workers, "epochs": count, "out": str(out)}
    spec |= {"timestep_buckets": timestep_buckets, "architecture": family(source)}
    run(source, folder, spec, ranks, **more)
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("*.json"))]
    steps = list(zip(*rows, strict=True))
    return [[step for step in steps if step[0]["epoch"] == epoch] for epoch in range(1, count + 1)]


def counted(epoch):
    return collections.Counter(item for step in epoch for row in step for item in row["items"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "workers", "seed"), [(1, 0, None), (1, 8, 42), (2, 0, None), (2, 2, 42), (4, 0, None)]
)
def test_every_item_once_and_one_shape_per_step(checkout, config, tmp_path, ranks, workers, seed):
    seen = epochs(checkout, tmp_path, config, ranks, workers, seed)
    assert seen[0] != seen[1]
    for epoch in seen:
        assert all(len({tuple(row["size"]) for row in step}) == 1 for step in epoch)
        assert all(row["items"] == row["captions"] for step in epoch for row in step)
        assert all(row["promised"] == len(epoch) * ranks for step in epoch for row in step)
        counts = counted(epoch)
        assert counts.keys() == ONCE.keys()
        repeated = sum(counts.values()) - COUNT
        within = [[item for row in step for item in row["items"]] for step in epoch]
        assert repeated == sum(len(items) - len(set(items)) for items in within)
        assert repeated < 2 * ranks


@pytest.mark.slow
def test_without_it_two_processes_miss_items(checkout, config, tmp_path):
    for epoch in epochs(checkout, tmp_path, config, ranks=2, door=()):
        assert len(counted(epoch)) < COUNT
        assert any(len({tuple(row["size"]) for row in step}) > 1 for step in epoch)


@pytest.mark.slow
def test_repeats_and_two_data_sets(checkout, config, tmp_path):
    write_config(tmp_path, num_repeats=3)
    for epoch in epochs(checkout, tmp_path, config):
        assert counted(epoch) == dict.fromkeys(range(COUNT), 3)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["order = 'runs'\nremainder = 'pad'", "max_pixels = 65536", "same_shape = false"])
def test_options_of_the_config(checkout, config, tmp_path, table):
    write_config(tmp_path, f"[kohya_bucket]\n{table}")
    for epoch in epochs(checkout, tmp_path, config, seed=1):
        counts = counted(epoch)
        assert counts.keys() == ONCE.keys()
        assert "pad" in table or counts == ONCE
        sizes = [len(step[0]["items"]) for step in epoch]
        assert ("max_pixels" in table) == (max(sizes) > 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("rule = 'exact'", "rule is set, but musubi-tuner trains from caches"),
        ("remainder = 'merge'", "remainder is 'merge', which trains images at other sizes"),
        ("ordr = 'runs'", "has no option 'ordr'; the nearest is 'order'"),
    ],
)
def test_options_that_caches_cannot_have(checkout, config, tmp_path, table, words):
    write_config(tmp_path, f"[kohya_bucket]\n{table}")
    spec = {"config": str(config), "seed": 1, "workers": 0, "epochs": 1, "out": str(tmp_path), "timestep_buckets": None}
    spec["architecture"] = family(checkout)
    said = run(checkout, tmp_path, spec, code=1)
    assert words in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_timesteps_are_spread_over_all_processes(checkout, config, tmp_path):
    """Each of ten parts of [0, 1) has its share of an epoch, and no two trainings of an epoch the same."""
    first, second = epochs(checkout, tmp_path, config, ranks=2, seed=1, timestep_buckets=10)
    drawn = [t for step in first for row in step for t in row["timesteps"]]
    assert len(drawn) == len(set(drawn)) == sum(counted(first).values())
    parts = collections.Counter(int(t * 10) for t in drawn)
    assert set(parts) == set(range(10))
    assert max(parts.values()) - min(parts.values()) <= 4
    assert drawn != [t for step in second for row in step for t in row["timesteps"]]


def train(source, folder, config, name, *options, ranks=1):
    """(batches in the order they were trained, the LoRA's bytes, the log) of the real trainer."""
    record = folder / "record"
    record.mkdir(exist_ok=True)
    for file in record.iterdir():
        file.unlink()
    arguments = ["--dit", folder / "dit.safetensors", "--dataset_config", config, "--output_dir", folder / name]
    arguments += ["--network_module", "musubi_tuner.networks.lora_zimage", "--network_dim", 4, "--output_name", "lora"]
    arguments += ["--sdpa", "--mixed_precision", "no", "--learning_rate", "1e-2", "--optimizer_type", "AdamW"]
    arguments += ["--timestep_sampling", "sigmoid", "--seed", 42, "--max_data_loader_n_workers", 2, *options]
    log = run(source, folder, {"train": [str(argument) for argument in arguments]}, ranks)
    return recorded(record), (folder / name / "lora.safetensors").read_bytes(), " ".join(log.split())


@pytest.mark.slow
def test_a_training_that_is_stopped_and_resumed(checkout, config, tmp_path):
    if not trains_z_image(checkout):
        pytest.skip("this version does not train Z-Image")
    whole, _, log = train(
        checkout, tmp_path, config, "whole", "--max_train_epochs", 2, "--save_state", "--save_every_n_steps", 5
    )
    half = len(whole) // 2
    assert [counted(whole[:half]), counted(whole[half:])] == [ONCE, ONCE]
    assert "9 seams checked" in log or "seams checked" in log
    assert f"epoch 2: {COUNT} images, 0 missed, 0 repeated" in log
    state = tmp_path / "whole" / "lora-step00000005-state"
    rest, _, log = train(checkout, tmp_path, config, "rest", "--max_train_epochs", 2, "--resume", state)
    assert "going on with batch 6 of epoch 1" in log
    assert rest == whole[5:]
    shared, _, _ = train(checkout, tmp_path, config, "two", "--max_train_epochs", 1, "--resume", state, ranks=2)
    assert counted(whole[:5]) + counted(shared) >= collections.Counter(ONCE)
