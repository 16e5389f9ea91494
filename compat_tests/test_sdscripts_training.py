"""LoRA training by the real `train_network.py`, through the launcher and through an installed patch.

Needs a checkpoint: `SD_MODEL` names an SD 1.5 safetensors file (random weights will do), `SD_TOKENIZERS` a folder
for `--tokenizer_cache_dir` where the tokenizer cannot be downloaded.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recording import recorded
from sdscripts_support import metadata, random_sizes, tensors, write_images

from kohya_bucket.adapter.marked_block import patch_install

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def model():
    path = os.environ.get("SD_MODEL")
    if not path:
        pytest.skip("SD_MODEL is not set: no checkpoint to train on")
    return Path(path)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "images"
    write_images(folder, random_sizes(11, 1, 100, 300))
    return folder


def config_file(tmp_path, folder, extra="", **dataset):
    keys = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**keys, **dataset}.items()]
    text = "[[datasets]]\n" + "\n".join(lines)
    text += f"\n[[datasets.subsets]]\nimage_dir = '{folder}'\ncaption_extension = '.txt'\nflip_aug = true\n{extra}\n"
    file = tmp_path / "dataset.toml"
    file.write_text(text, encoding="utf-8")
    return file


def train(checkout, model, config, *options, door=("-m", "kohya_bucket.launch"), steps=4, record=None):
    out = config.parent / "out"
    tokenizers = os.environ.get("SD_TOKENIZERS")
    command = [sys.executable, *door] + ([str(checkout / "train_network.py")] if record is None else [])
    command += ["--pretrained_model_name_or_path", str(model), "--dataset_config", str(config)]
    command += ["--output_dir", str(out), "--output_name", "lora", "--save_model_as", "safetensors"]
    command += ["--network_module", "networks.lora", "--network_dim", "2", "--learning_rate", "1e-4"]
    command += ["--optimizer_type", "AdamW", "--max_train_steps", str(steps), "--mixed_precision", "bf16", "--sdpa"]
    command += ["--max_data_loader_n_workers", "2", "--cache_latents", *options]
    command += ["--tokenizer_cache_dir", tokenizers] if tokenizers else []
    environment = {
        **os.environ,
        # Another accelerate than the installed one, where a folder holds it.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("KOHYA_BUCKET_ACCELERATE"), str(ROOT)])),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SD_SCRIPTS_DIR": str(checkout),
    }
    if record is not None:
        record.mkdir()
        environment |= {"RECORD_DIR": str(record), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    return done, out / "lora.safetensors"


def assert_trained(done, file, steps=4):
    assert done.returncode == 0, done.stderr[-3000:]
    assert "kohya_bucket in sd-scripts" in done.stderr + done.stdout
    assert metadata(file)["ss_steps"] == str(steps)


def test_latents_in_memory(unpatched, sd_scripts_dir, model, data, tmp_path):
    config = config_file(tmp_path, data)
    done, file = train(sd_scripts_dir, model, config)
    assert_trained(done, file)
    ours = metadata(file)
    done, file = train(sd_scripts_dir, model, config, door=())
    assert done.returncode == 0, done.stderr[-3000:]
    assert "kohya_bucket" not in done.stderr
    for key in ("ss_bucket_info", "ss_num_train_images", "ss_num_batches_per_epoch", "ss_datasets", "ss_dataset_dirs"):
        assert ours.get(key) == metadata(file).get(key), key


def test_latents_on_disk(unpatched, sd_scripts_dir, model, data, tmp_path):
    config = config_file(tmp_path, data)
    for _ in range(2):
        done, file = train(sd_scripts_dir, model, config, "--cache_latents_to_disk")
        assert_trained(done, file)
    assert len(list(data.glob("*.npz"))) == 11


def test_no_upscale_on_images_that_end_in_a_division_by_zero(unpatched, sd_scripts_dir, model, data, tmp_path):
    write_images(data, [(50, 1000)], prefix="narrow")
    config = config_file(tmp_path, data, bucket_no_upscale=True)
    done, _ = train(sd_scripts_dir, model, config, door=())
    assert "ZeroDivisionError" in done.stderr
    done, file = train(sd_scripts_dir, model, config)
    assert_trained(done, file)
    assert "1 image will not be trained" in " ".join(done.stderr.split())


def test_through_the_patch(unpatched, sd_scripts_dir, model, data, tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(sd_scripts_dir, checkout, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    patch_install(checkout)
    done, file = train(checkout, model, config_file(tmp_path, data), door=())
    assert_trained(done, file)


@pytest.mark.parametrize(
    "options",
    [
        "rule = 'novelai'",
        "rule = 'exact'",
        "rule = 'auto'\nnum_buckets = 3",
        "rule = 'preset:NAME'",
        "rule = 'file:FILE'",
        "switching = 'geometric'\nmax_crop = 0.5",
        "no_upscale_fit = 'largest'",
        "order = 'runs'\nremainder = 'pad'",
        "remainder = 'merge'\nmerge_max_crop = 0.5",
        "resolutions = [128, 192]\nresolution_mode = 'rotate'\nremainder = 'catch_all'",
    ],
)
def test_every_rule(unpatched, sd_scripts_dir, model, data, tmp_path, options):
    buckets = tmp_path / "buckets.toml"
    sizes = [(128, 128), (192, 64), (64, 192)]
    buckets.write_text(
        "name = 'mine'\nvae_factor = 64\n" + "".join(f"[[buckets]]\nwidth = {w}\nheight = {h}\n" for w, h in sizes),
        encoding="utf-8",
    )
    options = options.replace("NAME", "sd15").replace("FILE", buckets.as_posix())
    config = config_file(tmp_path, data, f"[kohya_bucket]\n{options}", bucket_no_upscale="no_upscale_fit" in options)
    steps = 1 if "preset" in options else 4  # a preset's images are 16 times as large as the others here
    done, file = train(sd_scripts_dir, model, config, steps=steps)
    assert_trained(done, file, steps)


def test_shards_train_the_same_weights_as_npz(unpatched, sd_scripts_dir, model, data, tmp_path):
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    weights = []
    for table in ("latent_cache = 'npz'", f"latent_cache = 'shards'\nlatent_cache_dir = '{tmp_path / 'store'}'"):
        config = config_file(tmp_path, data, f"[kohya_bucket]\n{table}")
        options = ("--cache_latents_to_disk", "--seed", "7", "--vae_batch_size", "1")
        done, file = train(sd_scripts_dir, model, config, *options)
        assert_trained(done, file)
        weights.append(tensors(file))
    assert list((tmp_path / "store").iterdir())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("remainder", ["merge", "catch_all"])
def test_several_sizes_from_disk(unpatched, sd_scripts_dir, model, data, tmp_path, remainder):
    """Shards and npz, each made at the start of one run and read by it, train the same weights."""
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    table = SEVERAL.replace("'merge'", f"'{remainder}'") + "\n"
    weights = []
    for kind in ("latent_cache = 'npz'", f"latent_cache = 'shards'\nlatent_cache_dir = '{tmp_path / 'store'}'"):
        config = config_file(tmp_path, data, table + kind)
        done, file = train(
            sd_scripts_dir, model, config, "--cache_latents_to_disk", "--seed", "7", "--vae_batch_size", "1"
        )  # fmt: skip
        assert_trained(done, file)
        weights.append(tensors(file))
    assert len(list(data.glob("*_sd.npz"))) == 11
    assert len(list(data.glob("*_sd_at_*.npz"))) > 11  # each image at the other resolution, and those that may move
    assert list((tmp_path / "store").iterdir())
    assert weights[0] == weights[1]


SEVERAL = (
    "[kohya_bucket]\nresolutions = [128, 192]\nresolution_mode = 'rotate'\nremainder = 'merge'\nmerge_max_crop = 0.5"
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stopped_and_resumed_with_accumulation(unpatched, sd_scripts_dir, model, data, tmp_path, ranks):
    """Two epochs of a run, and its second part again from a state in mid-epoch: the same images at the same sizes."""
    config = config_file(tmp_path, data, SEVERAL, batch_size=1)
    door = [str(ROOT / "compat_tests" / "recording_trainer.py")]
    if ranks > 1:
        door = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *door]
    options = ["--gradient_accumulation_steps", "2", "--save_every_n_steps", "2", "--save_state", "--seed", "3"]
    total = 6 if ranks > 1 else 9
    done, file = train(
        sd_scripts_dir, model, config, *options, door=door, steps=total, record=tmp_path / "whole"
    )  # fmt: skip
    assert_trained(done, file, total)
    whole = recorded(tmp_path / "whole")
    assert {len(step) for step in whole} == {ranks}
    assert all(len({tuple(row["size"]) for row in step}) == 1 for step in whole)
    assert len({tuple(row["size"]) for step in whole for row in step}) > 2
    state, weights = tmp_path / "out" / "lora-step00000002-state", tensors(file)
    # With another seed the images were the same too, but latents that are made anew are drawn by it.
    resume = ["--resume", str(state), "--gradient_accumulation_steps", "2", "--seed", "3"]
    for number, place in enumerate([["--skip_until_initial_step"], ["--initial_step", "2"]][: 3 - ranks]):
        rest = tmp_path / f"rest{number}"
        done, file = train(sd_scripts_dir, model, config, *resume, *place, door=door, steps=total, record=rest)
        assert_trained(done, file, total)
        assert recorded(rest) == whole[4:]
        # sd-scripts saves the random states of the first process alone.
        assert ranks > 1 or tensors(file) == weights
