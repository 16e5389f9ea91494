"""Each trainer of sd-scripts by its own command line: it starts, and trains every image once, cached and not."""

import json
import re
import shutil
from typing import NamedTuple

import pytest
from sdscripts_support import random_sizes, write_images
from test_sdscripts_training import epochs_of
from training_runs import train, write_config

COUNT = 5
NAMES = {f"number {i}": 1 for i in range(COUNT)}
pytestmark = pytest.mark.slow

CLIPS_AND_T5 = [part for name in ("clip_l", "clip_g", "t5xxl") for part in (f"--{name}", f"{name}.safetensors")]
FLUX = [part for name in ("clip_l", "t5xxl", "ae") for part in (f"--{name}", f"{name}.safetensors")]
FLUX += ["--guidance_scale", 1.0, "--timestep_sampling", "shift", "--model_prediction_type", "raw"]
LUMINA = ["--gemma2", "gemma2.safetensors", "--ae", "ae.safetensors"]
ANIMA = ["--attn_mode", "torch", "--qwen3", "qwen3.safetensors", "--vae", "vae.safetensors"]
HUNYUAN = [
    "--mixed_precision",
    "bf16",  # as its text encoders are
    "--text_encoder",
    "vlm.safetensors",
    "--byt5",
    "byt5.safetensors",
    "--vae",
    "vae.safetensors",
]
NEW_WORD = ["--token_string", "zzz", "--init_word", "a", "--num_vectors_per_token", 1]
OUTPUTS = ["--cache_text_encoder_outputs", "--cache_text_encoder_outputs_to_disk"]
LATENTS = ["--cache_latents", "--cache_latents_to_disk"]


class Trainer(NamedTuple):
    """`network`: the module of a LoRA. `kind`: of its subsets. `cached`: the options with which it caches."""

    options: tuple = ()
    network: str = ""
    kind: str = "folder"
    cached: tuple = tuple(LATENTS)


TRAINERS = {
    "train_network.py": Trainer(network="networks.lora"),
    "train_db.py": Trainer(),
    "fine_tune.py": Trainer(kind="metadata"),
    "train_textual_inversion.py": Trainer(NEW_WORD),
    "train_control_net.py": Trainer(kind="conditioning"),
    "sdxl_train.py": Trainer(cached=[*LATENTS, *OUTPUTS]),
    "sdxl_train_network.py": Trainer(network="networks.lora", cached=[*LATENTS, *OUTPUTS]),
    "sdxl_train_textual_inversion.py": Trainer(NEW_WORD),
    "sd3_train.py": Trainer(CLIPS_AND_T5, cached=[*LATENTS, *OUTPUTS]),
    "sd3_train_network.py": Trainer(CLIPS_AND_T5, "networks.lora_sd3", cached=[*LATENTS, *OUTPUTS]),
    "flux_train.py": Trainer(FLUX, cached=[*LATENTS, *OUTPUTS]),
    "flux_train_network.py": Trainer(FLUX, "networks.lora_flux", cached=[*LATENTS, *OUTPUTS]),
    "flux_train_control_net.py": Trainer(FLUX, kind="conditioning", cached=[*LATENTS, *OUTPUTS]),
    "lumina_train.py": Trainer(LUMINA, cached=[*LATENTS, *OUTPUTS]),
    "lumina_train_network.py": Trainer(LUMINA, "networks.lora_lumina", cached=[*LATENTS, *OUTPUTS]),
    "hunyuan_image_train_network.py": Trainer(HUNYUAN, "networks.lora_hunyuan_image", cached=[*LATENTS, *OUTPUTS]),
    "anima_train.py": Trainer(ANIMA, cached=[*LATENTS, *OUTPUTS]),
    "anima_train_network.py": Trainer(ANIMA, "networks.lora_anima", cached=[*LATENTS, *OUTPUTS]),
    "anima_train_control_net_lllite.py": Trainer(ANIMA, kind="conditioning", cached=[*LATENTS, *OUTPUTS]),
}


def dataset(unpatched, tmp_path, kind):
    """The config of five images, as folders with captions, as metadata, or with control images."""
    images = tmp_path / "images"
    write_images(images, random_sizes(COUNT, 1, 100, 300))
    captions = "caption_extension = '.txt'"
    config = write_config(tmp_path, images, subset="", bucket_reso_steps=64)
    if kind == "conditioning":
        write_images(tmp_path / "control", random_sizes(COUNT, 1, 100, 300))
        captions += f"\nconditioning_data_dir = '{tmp_path / 'control'}'"
    elif kind == "metadata":
        entries = {str(file): {"caption": file.with_suffix(".txt").read_text()} for file in images.glob("*.png")}
        (tmp_path / "metadata.json").write_text(json.dumps(entries), encoding="utf-8")
        captions = f"metadata_file = '{tmp_path / 'metadata.json'}'"
    text = config.read_text(encoding="utf-8").replace("caption_extension = '.txt'", captions)
    config.write_text(text, encoding="utf-8")
    qwen = unpatched.root / "configs" / "qwen3_06b"
    if qwen.is_dir():
        shutil.copytree(qwen, tmp_path / "tokenizers" / "Qwen_Qwen2.5-VL-7B-Instruct")
    return config


def last_error(log):
    """The exception that a run ended with, without what differs from run to run."""
    log = re.sub(r"\[[^\[\]]*(?:it/s|s/it)[^\[\]]*\]", "", log)  # of a progress bar
    found = re.findall(r"\b(\w+(?:Error|Exception|Exit)): (.{0,160})", log)
    return ": ".join(found[-1]) if found else ""


def name_of(file, cached):
    """As the page of versions has it."""
    return f"{file}, {'cached' if cached else 'not cached'}"


CASES = [
    pytest.param(file, cached, marks=pytest.mark.training_run(name_of(file, cached)))
    for file in TRAINERS
    for cached in (False, True)
]


@pytest.mark.parametrize(("file", "cached"), CASES)
def test_every_image_once(unpatched, sd_scripts_dir, tmp_path, file, cached):
    if not (sd_scripts_dir / file).is_file():
        pytest.skip(f"this version has no {file}")
    trainer = TRAINERS[file]
    config = dataset(unpatched, tmp_path, trainer.kind)
    options = ["--max_train_epochs", 1, *trainer.options, *(trainer.cached if cached else [])]
    if trainer.network:
        options += ["--network_module", trainer.network]
        options += ["--network_train_unet_only"] if cached or "hunyuan" in file else []
    run = train(
        sd_scripts_dir, config, *options, out=tmp_path / "ours", trainer=file, network=bool(trainer.network)
    )  # fmt: skip
    if run.status:
        theirs = train(
            sd_scripts_dir, config, *options, out=tmp_path / "theirs", trainer=file, door=(),
            network=bool(trainer.network),
        )  # fmt: skip
        why = last_error(theirs.log)
        assert theirs.status, run.log[-4000:]
        assert last_error(run.log) == why, run.log[-4000:]
        place = "behind its last step" if epochs_of(run.batches, 1) == [NAMES] else "in between"
        pytest.skip(f"{name_of(file, cached)}: ends {place} without kohya_bucket too: {why}")
    assert "kohya_bucket in sd-scripts" in run.log
    assert epochs_of(run.batches, 1) == [NAMES]
    assert f"epoch 1: {COUNT} images, 0 missed, 0 repeated" in run.log
    caches = len(list((tmp_path / "images").glob("*.npz")))
    assert caches == (COUNT * sum("to_disk" in option for option in trainer.cached) if cached else 0)
