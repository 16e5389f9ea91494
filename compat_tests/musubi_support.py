"""The real musubi-tuner (`MUSUBI_DIR` names a checkout) with made-up caches, its loaders and trainers in processes."""

import collections
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from recording import recorded

HERE = Path(__file__).resolve().parent
COUNT = 41
SIZES = [(1024, 1024), (1024, 768), (768, 1024), (1280, 720), (720, 1280), (1000, 600), (600, 1000)]
ONCE = dict.fromkeys(range(COUNT), 1)


def make_data(source, folder, family):
    """A config, images and their caches."""
    from PIL import Image

    (folder / "images").mkdir()
    draws = random.Random(1)  # as in make_caches
    for i in range(COUNT):
        Image.new("RGB", draws.choice(SIZES)).save(folder / "images" / f"im{i:03d}.png")
        (folder / "images" / f"im{i:03d}.txt").write_text(f"caption {i}", encoding="utf-8")
    make_caches(source, folder / "cache", family)
    return write_config(folder)


def make_caches(source, folder, family, side=128):
    """Caches at a resolution: every value of an item's latents and of its caption is its number."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    draws, place = random.Random(1), bucket_selector(source, family, side)
    for i in range(COUNT):
        width, height = draws.choice(SIZES)
        w, h = (side // 8 for side in place(width, height))
        shape = (16, 1, h, w) if family == "hv" else (16, h, w)
        latents = {f"latents_1x{h}x{w}_float32": torch.full(shape, float(i))}
        save_file(latents, folder / f"im{i:03d}_{width:04d}x{height:04d}_{family}.safetensors")
        save_file(text_of(family, i), folder / f"im{i:03d}_{family}_te.safetensors")


def text_of(family, i):
    import torch

    if family != "hv":
        return {"varlen_llm_embed_float32": torch.full((3 + i % 5, 32), float(i))}
    mask = torch.ones(4, dtype=torch.int64)
    return {
        "llm_float32": torch.full((4, 4096), i / 100),
        "llm_mask": mask,
        "clipL_float32": torch.full((768,), i / 100),
    }


def trains_z_image(source):
    return (source / "musubi_tuner" / "zimage_train_network.py").is_file()


def family(source):
    """Z-Image, or Qwen-Image where a version does not have it."""
    return "zi" if trains_z_image(source) else "qi"


def bucket_selector(source, family, side):
    program = (
        "import json, sys; from musubi_tuner.dataset.image_video_dataset import BucketSelector; "
        f"place = BucketSelector(({side}, {side}), True, False, '{family}').get_bucket_resolution; "
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


def run(source, folder, spec, ranks=1, door=("-m", "kohya_bucket.launch"), code=0, python=sys.executable, **told):
    """What the script says; it is run by the launcher unless `door` is another. `told` are environment variables."""
    file = folder / "spec.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [python, *several, *door, str(HERE / "musubi_script.py"), str(file)]
    told = environment(source, RECORD_DIR=str(folder / "record")) | told
    done = subprocess.run(
        command, env=told, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=600
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr + done.stdout


def epochs(*arguments, **more):
    """Per epoch the steps, each with a row for each process."""
    return epochs_and_log(*arguments, **more)[0]


def epochs_and_log(
    source, folder, config, ranks=1, workers=0, seed=None, count=2, timestep_buckets=None, cut=(), of=None, **more
):
    """That, and what was said. Files in `cut` lose their end when the datasets are made; `of` is a family that the
    trainer learns first.
    """
    out = folder / "rows"
    out.mkdir(exist_ok=True)
    for file in out.iterdir():
        file.unlink()
    spec = {"config": str(config), "seed": seed, "workers": workers, "epochs": count, "out": str(out)}
    spec |= {
        "timestep_buckets": timestep_buckets,
        "architecture": of or family(source),
        "cut": [str(path) for path in cut],
    }
    said = run(source, folder, spec, ranks, **more)
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("*.json"))]
    steps = list(zip(*rows, strict=True))
    return [[step for step in steps if step[0]["epoch"] == epoch] for epoch in range(1, count + 1)], said


def counted(epoch):
    return collections.Counter(item for step in epoch for row in step for item in row["items"])


NETWORKS = {
    "zimage_train_network": "lora_zimage", "wan_train_network": "lora_wan", "qwen_image_train_network":
    "lora_qwen_image", "flux_kontext_train_network": "lora_flux",
}  # fmt: skip


def train(source, folder, config, name, *options, ranks=1, program="zimage_train_network", **more):
    """(batches in the order they were trained, the log) of a real trainer."""
    record = folder / "record"
    record.mkdir(exist_ok=True)
    for file in record.iterdir():
        file.unlink()
    arguments = ["--dit", folder / "dit.safetensors", "--dataset_config", config, "--output_dir", folder / name]
    if "network" in program:
        network = NETWORKS[program]
        arguments += ["--network_module", f"musubi_tuner.networks.{network}", "--network_dim", 4]
    arguments += ["--output_name", "model", "--sdpa", "--mixed_precision", "no", "--learning_rate", "1e-2"]
    arguments += ["--optimizer_type", "AdamW", "--timestep_sampling", "sigmoid", "--seed", 42]
    arguments += ["--max_data_loader_n_workers", 2, *options]
    spec = {"program": program, "train": [str(argument) for argument in arguments]}
    log = run(source, folder, spec, ranks, **more)
    return recorded(record), " ".join(log.split())
