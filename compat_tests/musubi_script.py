"""Run by `test_musubi_epochs.py`: the real datasets, collator, loader and accelerate of musubi-tuner, without a model.

`musubi_script.py SPEC.json`: trains nothing for some epochs, and writes what each process is given, step by step. With
`train` in it, the real trainer that `program` names, with a tiny random model, in place of that.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import random
import runpy
import sys
from multiprocessing import Value
from pathlib import Path

EMBEDS = ("mmh3_hidden_states", "llm_embed", "vl_embed", "t5", "llm", "llama_vec")


def collator(epoch, group):
    home = "training.accelerator_setup" if importlib.util.find_spec("musubi_tuner.training") else "hv_train_network"
    return importlib.import_module(f"musubi_tuner.{home}").collator_class(epoch, group)


def batches(spec):
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from musubi_tuner.dataset import config_utils
    from musubi_tuner.dataset.image_video_dataset import BucketSelector as bucket_selector

    set_seed(random.randint(0, 2**32) if spec["seed"] is None else spec["seed"])  # as the trainers do it
    epoch = Value("i", 0)
    space = argparse.Namespace(dataset_config=spec["config"], debug_dataset=False)
    generator = config_utils.BlueprintGenerator(config_utils.ConfigSanitizer())
    bucket_selector.ARCHITECTURE_STEPS_MAP.setdefault(spec["architecture"], 16)
    blueprint = generator.generate(
        config_utils.load_user_config(spec["config"]), space, architecture=spec["architecture"]
    )
    make = config_utils.generate_dataset_group_by_blueprint
    known = inspect.signature(make).parameters
    more = {"num_timestep_buckets": spec["timestep_buckets"], "shared_epoch": epoch}
    more = {name: value for name, value in more.items() if name in known}
    group = make(blueprint.dataset_group, training=True, **more)
    accelerator = Accelerator(cpu=True)
    workers = spec["workers"]
    loader = torch.utils.data.DataLoader(
        group, batch_size=1, shuffle=True, collate_fn=collator(epoch, None if workers else group), num_workers=workers,
        persistent_workers=workers > 0,
    )  # fmt: skip
    for name in spec.get("cut", ()):  # caches that break while the run is on its way
        Path(name).write_bytes(Path(name).read_bytes()[:-10])
    promised = len(loader)
    model = torch.nn.Linear(1, 1)
    _, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0), loader)
    for number in range(1, spec["epochs"] + 1):
        epoch.value = number
        for batch in loader:
            latents = batch["latents"]
            yield {
                "epoch": number,
                "promised": promised,
                "items": [int(value) for value in latents.flatten(1)[:, 0].tolist()],
                "captions": [int(embed[0, 0]) for embed in next(batch[key] for key in EMBEDS if key in batch)],
                "size": list(latents.shape[-2:]),
                "timesteps": batch["timesteps"],
            }


def train(program, arguments):
    """A trainer of musubi-tuner, run by its path, with a tiny random model in place of the one that it loads."""
    import accelerate

    dit = Path(arguments[arguments.index("--dit") + 1])
    if program in TINY:
        TINY[program](dit)
    from recording import leave_frozen_models_unwrapped

    leave_frozen_models_unwrapped(sys.modules[accelerate.Accelerator.__module__])
    _write_down_what_is_trained(accelerate.Accelerator)
    script = Path(sys.modules["musubi_tuner"].__file__).with_name(f"{program}.py")
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def tiny_z_image(dit):
    import torch
    from musubi_tuner.zimage import zimage_config

    tiny = {"DIM": 64, "N_LAYERS": 2, "N_REFINER_LAYERS": 1, "N_HEADS": 2, "N_KV_HEADS": 2, "CAP_FEAT_DIM": 32}
    for name, value in tiny.items():  # read when the model is made
        setattr(zimage_config, f"DEFAULT_TRANSFORMER_{name}", value)
    zimage_config.ROPE_AXES_DIMS = [8, 12, 12]
    from musubi_tuner.zimage import zimage_model

    _random_weights(dit, lambda: zimage_model.create_model("torch", False, torch.float32))


def tiny_wan(dit):
    import torch

    torch.cuda.current_device = lambda: 0  # asked when its modules are imported
    from musubi_tuner.wan.configs import WAN_CONFIGS
    from musubi_tuner.wan.modules.model import WanModel

    tiny = {"dim": 64, "ffn_dim": 64, "freq_dim": 32, "num_heads": 2, "num_layers": 1}
    WAN_CONFIGS["t2v-1.3B"].update(tiny)
    _narrow(WanModel, text_dim=32)
    _random_weights(dit, lambda: WanModel("t2v", model_version="2.1", attn_mode="torch", **tiny))


def tiny_qwen_image(dit):
    from musubi_tuner.qwen_image.qwen_image_model import QwenImageTransformer2DModel as Model

    sizes = {"num_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 32}
    _narrow(Model, **sizes, axes_dims_rope=(8, 12, 12))
    _random_weights(dit, Model)


def tiny_flux_kontext(dit):
    from musubi_tuner.flux import flux_models

    params = flux_models.configs_flux_dev_context.params
    vars(params).update(
        hidden_size=64, num_heads=2, depth=1, depth_single_blocks=1, axes_dim=[8, 12, 12], context_in_dim=32,
        vec_in_dim=4,
    )  # fmt: skip
    _random_weights(dit, lambda: flux_models.Flux(params, "torch", False))


TINY = {
    "zimage_train_network": tiny_z_image, "wan_train_network": tiny_wan,
    "qwen_image_train_network": tiny_qwen_image, "flux_kontext_train_network": tiny_flux_kontext,
}  # fmt: skip


def _narrow(model, **sizes):
    """A class whose instances have these sizes, whatever they are asked for."""
    init = model.__init__
    model.__init__ = lambda self, *args, **kwargs: init(self, *args, **kwargs | sizes)


def _random_weights(file, make):
    import torch
    from safetensors.torch import save_file

    if not file.exists():
        torch.manual_seed(0)
        shapes = make().state_dict()
        save_file({name: torch.randn(value.shape) * 0.05 for name, value in shapes.items()}, file)


def _write_down_what_is_trained(accelerator):
    """A row for each batch whose loss is used, with what that was multiplied by; what is fetched ahead has none."""
    from accelerate.data_loader import DataLoaderShard

    original, iterate, last = accelerator.backward, DataLoaderShard.__iter__, {}
    file = Path(os.environ["RECORD_DIR"]) / f"rank{os.environ.get('RANK', '0')}.jsonl"

    def remember(self):
        for batch in iterate(self):
            last["latents"] = batch["latents"]
            yield batch

    def used(self, loss, **kwargs):
        latents = last["latents"]
        row = {"items": [int(value) for value in latents.flatten(1)[:, 0].tolist()], "size": list(latents.shape[-2:])}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row | {"scale": round(loss.item() / last["loss"], 4)}) + "\n")
        return original(self, loss, **kwargs)

    accelerator.backward, DataLoaderShard.__iter__ = used, remember
    importlib.import_module("musubi_tuner.dataset.config_utils")  # the door is open now, if there is one
    through_door = accelerator.backward

    def asked(self, loss, **kwargs):
        last["loss"] = loss.item()
        return through_door(self, loss, **kwargs)

    accelerator.backward = asked


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "train" in told:
        train(told["program"], told["train"])
    else:
        rows = list(batches(told))
        out = Path(told["out"]) / f"{os.environ.get('RANK', '0')}.json"
        out.write_text(json.dumps(rows), encoding="utf-8")
