"""What musubi-tuner caches and trains of a config: `musubi_plan_script.py SPEC.json`.

The spec names `config`, `architecture` and `out`.
Its own datasets list, decode, resize and cut; in place of an autoencoder's, its caches hold zeros of the right shape.
Then its own datasets find the caches and put them into buckets.
"""

import argparse
import importlib
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from musubi_tuner.dataset import config_utils
from safetensors.torch import save_file

LATENT = {"f2d": 16, "ho1": 32}  # pixels, where it is not 8
NO_CONTROLS = ("zi",)  # families whose caches hold no control images


def group_of(spec, training):
    user = config_utils.load_user_config(spec["config"])
    generator = config_utils.BlueprintGenerator(config_utils.ConfigSanitizer())
    made = generator.generate(user, argparse.Namespace(), architecture=spec["architecture"])
    return config_utils.generate_dataset_group_by_blueprint(made.dataset_group, training=training)


def save_caches(dataset, architecture):
    """The names of all items that are cached."""
    out = []
    for _, batch in dataset.retrieve_latent_cache_batches(2):
        if architecture == "fp":
            out += in_sections(batch)
            continue
        for item in batch:
            content = item.content[0] if isinstance(item.content, list) else item.content
            frames = 1 if content.ndim == 3 else len(content)
            pixels = LATENT.get(architecture, 8)
            height, width = content.shape[-3] // pixels, content.shape[-2] // pixels
            latents = {f"latents_{(frames - 1) // 4 + 1}x{height}x{width}_float32": torch.zeros(1)}
            if isinstance(item.control_content, list) and architecture not in NO_CONTROLS:
                for i, control in enumerate(item.control_content):
                    shape = f"1x{control.shape[0] // pixels}x{control.shape[1] // pixels}"
                    latents[f"latents_control_{i}_{shape}_float32"] = torch.zeros(1)
            save_file(latents, item.latent_cache_path)
            out.append(item.latent_cache_path)
    for batch in dataset.retrieve_text_encoder_output_cache_batches(2):
        for item in batch:
            save_file({"varlen_embed_float32": torch.zeros(1)}, item.text_encoder_output_cache_path)
    return [Path(path).name for path in out]


def in_sections(batch):
    """FramePack's own cutting into sections; what its models would compute is zeros."""
    script = importlib.import_module("musubi_tuner.fpack_cache_latents")
    saved = []
    script.hunyuan = SimpleNamespace(
        vae_encode=lambda pixels, _: torch.zeros(
            len(pixels), 16, (pixels.shape[2] - 1) // 4 + 1, pixels.shape[3] // 8, pixels.shape[4] // 8
        )
    )
    script.hf_clip_vision_encode = lambda *_: SimpleNamespace(last_hidden_state=torch.zeros(1, 1, 1))

    def save(item_info, **_):
        save_file({"latents_1x1x1_float32": torch.zeros(1)}, item_info.latent_cache_path)
        saved.append(item_info.latent_cache_path)

    script.save_latent_cache_framepack = save
    vae = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    script.encode_and_save_batch(vae, None, None, batch)
    return saved


def found(dataset):
    buckets = dataset.batch_manager.buckets
    return {
        "batches": len(dataset.batch_manager),
        "buckets": [
            [list(key), [Path(item.latent_cache_path).name for item in items]] for key, items in buckets.items()
        ],
    }


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    logging.disable(logging.WARNING)
    try:
        cached = [save_caches(dataset, told["architecture"]) for dataset in group_of(told, False).datasets]
        result = {"cached": cached, "trained": [found(dataset) for dataset in group_of(told, True).datasets]}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    Path(told["out"]).write_text(json.dumps(result), encoding="utf-8")
