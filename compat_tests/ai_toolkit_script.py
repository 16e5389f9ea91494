"""A process that trains nothing with ai-toolkit's own loader: started by test_ai_toolkit.py, it writes down each batch.

ai_toolkit_script.py SETTINGS.json        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them
"""

import collections
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from absent_packages import pass_over_absent

sys.path.insert(0, os.environ["AI_TOOLKIT_DIR"])
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"


class Model:
    """What a dataset asks of the model."""

    use_raw_control_images = encode_control_in_text_embeddings = False
    is_xl = is_v3 = is_auraflow = is_flux = is_vega = is_ssd = False
    text_embedding_space_version, te_padding_side, latent_space_version = "sd1", "right", "flux1"
    model_config = types.SimpleNamespace(latent_space_version="flux1", is_pixart_sigma=False, arch="flux")
    adapter = types.SimpleNamespace(clip_image_processor=None)
    vae = unet = types.SimpleNamespace()

    step = 16

    def get_bucket_divisibility(self) -> int:
        return self.step


class Vision:
    """An adapter whose image encoder sees the mean of a picture."""

    input_size, config = 8, types.SimpleNamespace(quad_image=False, image_encoder_path="x")

    def __init__(self) -> None:
        self.image_encoder, self.encoded = self, 0

    def to(self, _: Any) -> None: ...

    def clip_image_processor(self, images: Any, **_: Any) -> Any:
        pixels = images if images.ndim == 4 else images[None]
        return types.SimpleNamespace(pixel_values=pixels.float())

    def __call__(self, pixels: Any, **_: Any) -> Any:
        self.encoded += 1
        seen = pixels.mean((2, 3))
        return types.SimpleNamespace(image_embeds=seen, hidden_states=[seen, seen])


def tiny_vae(dtype: str) -> Any:
    """Qwen-Image's, small, and with weights of its own."""
    import torch
    from diffusers import AutoencoderKLQwenImage

    torch.manual_seed(0)
    model = AutoencoderKLQwenImage(base_dim=8, z_dim=16, num_res_blocks=1).requires_grad_(False).eval()
    return model.to(getattr(torch, dtype))


def latent_of(vae: Any) -> list[float]:
    """The latent of a picture, as ai-toolkit's models encode it."""
    import torch

    pixels = torch.rand((1, 3, 1, 64, 64), generator=torch.Generator().manual_seed(1)) * 2 - 1
    latent: list[float] = vae.encode(pixels.to(vae.dtype)).latent_dist.mode().float().flatten().tolist()
    return latent


class Training:
    """The part of a trainer's process that its loaders meet: datasets, steps, and checkpoints that hold both."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from toolkit.config_modules import DatasetConfig

        self.folder, self.settings = Path(settings["out"]), settings
        self.job = types.SimpleNamespace(raw_config={"job": "extension", "config": {"name": "x"}, **settings["job"]})
        self.datasets = [DatasetConfig(default_caption="x", **one) for one in settings["datasets"]]
        self.datasets_reg = [DatasetConfig(default_caption="x", **one) for one in settings.get("datasets_reg", [])]
        self.step_num = self.epoch_num = 0
        saved = self.get_latest_save_path() if settings.get("resume") else None
        if saved:
            from toolkit.metadata import load_metadata_from_safetensors

            info = load_metadata_from_safetensors(saved)["training_info"]
            if int(os.environ.get("RANK", 0)) == 0:  # as in the trainer, no other rank reads it
                self.step_num, self.epoch_num = info["step"], info["epoch"]

    def get_latest_save_path(self) -> str | None:
        saves = sorted(self.folder.glob("x_*.safetensors"))
        return str(saves[-1]) if saves else None

    def get_training_info(self) -> dict[str, Any]:
        return {"step": self.step_num, "epoch": self.epoch_num}

    def save(self) -> None:
        import torch
        from safetensors.torch import save_file
        from toolkit.metadata import get_meta_for_safetensors

        meta = get_meta_for_safetensors(collections.OrderedDict(training_info=self.get_training_info()))
        save_file({"x": torch.zeros(1)}, str(self.folder / f"x_{self.step_num:09d}.safetensors"), meta)

    def run(self, rank: int, ranks: int) -> None:
        import torch
        from toolkit.data_loader import get_dataloader_from_datasets, trigger_dataloader_setup_epoch

        model = Model()
        model.use_raw_control_images = self.settings.get("raw_controls", False)
        model.arch, model.step = self.settings.get("arch", "flux"), self.settings.get("step", 16)
        if self.settings.get("latent_names"):
            from toolkit.data_loader import AiToolkitDataset

            def name_latents(data: Any) -> None:
                for item in data.file_list:
                    item.get_latent_path(recalculate=True)

            AiToolkitDataset.cache_latents_all_latents = name_latents
            for config in self.datasets:
                config.cache_latents_to_disk = True
        if self.settings.get("vae"):
            model.vae = tiny_vae(self.settings["vae"])
        if self.settings.get("vision"):
            model.adapter, model.device, model.device_torch, model.torch_dtype = Vision(), "cpu", "cpu", torch.float32
            model.set_device_state_preset = model.restore_device_state = lambda *_: None
        loaders = {"main": get_dataloader_from_datasets(self.datasets, self.settings["batch_size"], model)}
        if self.datasets_reg:
            loaders["reg"] = get_dataloader_from_datasets(self.datasets_reg, self.settings["batch_size"], model)
        if self.settings.get("vae"):
            print(json.dumps(latent_of(model.vae)), flush=True)
        if self.settings.get("vision"):
            seen = {}
            for item in loaders["main"].dataset.datasets[0].file_list:
                item.load_clip_image()
                seen[Path(item.path).name] = item.clip_image_embeds["image_embeds"].flatten().tolist()
            print(json.dumps({"seen": seen, "encoded": model.adapter.encoded}), flush=True)
            (self.folder / f"rank{rank}.jsonl").touch()
            return
        if self.settings.get("latent_names"):
            items = loaders["main"].dataset.datasets[0].file_list
            print(json.dumps({Path(item.path).name: item.get_latent_path() for item in items}), flush=True)
            (self.folder / f"rank{rank}.jsonl").touch()
            return
        drawn = {name: iter(loader) for name, loader in loaders.items()}
        epochs = dict.fromkeys(loaders, 0)
        with (self.folder / f"rank{rank}.jsonl").open("a", encoding="utf-8") as log:
            for step in range(self.step_num, self.step_num + self.settings["steps"]):
                name = "reg" if step % 2 == 0 and "reg" in loaders else "main"
                try:
                    batch = next(drawn[name])
                except StopIteration:
                    drawn[name] = iter(loaders[name])
                    trigger_dataloader_setup_epoch(loaders[name])
                    epochs[name] += 1
                    batch = next(drawn[name])
                items = [
                    [item.dataset_config.resolution, Path(item.path).name, item.flip_x, item.flip_y]
                    for item in batch.file_items
                ]
                row = {"loader": name, "epoch": epochs[name], "items": items, "shape": list(batch.tensor.shape)}
                each = batch.control_tensor if batch.control_tensor_list is None else batch.control_tensor_list
                row["controls"] = [] if each is None else [_shapes(controls) for controls in each]
                log.write(json.dumps({**row, "length": len(loaders[name])}) + "\n")
                log.flush()
                self.step_num = step + 1
                if rank == 0 and self.step_num == self.settings.get("save_at"):
                    self.save()
                    if self.settings.get("dies"):
                        os._exit(9)


def _shapes(controls: Any) -> list[list[int]]:
    """Of the control images of one item: [3, H, W] of one, [N, 3, H, W] or a list of several."""
    several = [controls] if getattr(controls, "ndim", 4) == 3 else controls
    return [list(one.shape) for one in several]


def main() -> None:
    pass_over_absent()
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import torch

    torch.manual_seed(settings["seed"])
    if settings.get("plan", True):
        import logging

        from kohya_bucket.trainers.ai_toolkit.door import DOOR

        logging.basicConfig(level=logging.INFO)
        DOOR.open()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    Training(settings).run(rank, ranks)
    os._exit(0) if ranks > 1 else None


if __name__ == "__main__":
    main()
