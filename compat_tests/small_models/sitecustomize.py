"""Lets sd-scripts' real trainers run in seconds on a CPU, and writes down every batch that is trained.

On the path of a process (Python imports a module of this name by itself) it changes nothing of sd-scripts on disk.
With `SMALL_MODELS` set, SD 1.5's UNet, text encoder and VAE are random and tiny, through the same interfaces (SDXL's
and FLUX's: `small_families.py`; those of other families: `small_flow_models.py`); set to "mean", a latent of that VAE
is the means of 8x8 pixels, so that it shows what was encoded. With `RECORD_DIR` set, a batch is
written down when its step begins: what is fetched ahead or skipped is not. On several CPU
processes frozen models are left unwrapped, as accelerate does on GPUs.
"""

import importlib.abc
import importlib.util
import os
import sys

last = {}


def small_unet(module):
    module.BLOCK_OUT_CHANNELS, module.TIMESTEP_INPUT_DIM, module.TIME_EMBED_DIM = (32, 32, 64, 64), 32, 128

    def forward(
        self, sample, timestep, encoder_hidden_states, *_, down_block_additional_residuals=None, **__
    ):  # fmt: skip
        """The first attention alone, and what a ControlNet adds there: enough to train on."""
        attention = self.down_blocks[0].attentions[0]
        hidden = attention(self.conv_in(sample), encoder_hidden_states=encoder_hidden_states).sample
        if down_block_additional_residuals is not None:
            hidden = hidden + down_block_additional_residuals[0]
        return module.SampleOutput(sample=self.conv_out(hidden))

    module.UNet2DConditionModel.forward = forward


def means(pixels, *_, **__):
    from types import SimpleNamespace

    import torch

    latents = torch.nn.functional.avg_pool2d(pixels[:, :1].repeat(1, 4, 1, 1), 8)
    return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: latents))


def small_checkpoint(module):
    module.UNET_PARAMS_CONTEXT_DIM = 32

    def load(v2, path, *_, **__):
        """(text encoder, VAE, UNet), the same in every process."""
        import torch
        from diffusers import AutoencoderKL
        from library import original_unet
        from small_families import as_sdscripts_has_it
        from transformers import CLIPTextConfig, CLIPTextModel

        state = torch.random.get_rng_state()
        torch.manual_seed(0)
        text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=256,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                projection_dim=32,
                bos_token_id=254,
                eos_token_id=255,
                pad_token_id=255,
            )
        )
        vae = AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[8] * 4, norm_num_groups=2, latent_channels=4,
        )  # fmt: skip
        if os.environ["SMALL_MODELS"] == "mean":
            vae.encode = means
        unet = original_unet.UNet2DConditionModel(**module.create_unet_diffusers_config(v2))
        torch.random.set_rng_state(state)
        return as_sdscripts_has_it(text_encoder), vae, unet

    module.load_models_from_stable_diffusion_checkpoint = load
    module.save_stable_diffusion_checkpoint = lambda *_, **__: 0  # there is no whole checkpoint to put it in


def small_controlnet(module):
    def from_unet(cls, unet, *_, **__):
        return cls(
            block_out_channels=(32, 32, 64, 64), layers_per_block=1, cross_attention_dim=32, attention_head_dim=8,
            conditioning_embedding_out_channels=(16, 16, 16, 16),
        )  # fmt: skip

    module.ControlNetModel.from_unet = classmethod(from_unet)


def remember_batches(*loaders):
    for loader in loaders:

        def iterate(self, original=loader.__iter__):
            for batch in original(self):
                last["batch"] = batch  # the outermost loader yields last
                yield batch

        loader.__iter__ = iterate


def record_steps(module):
    from recording import leave_frozen_models_unwrapped, write_down

    leave_frozen_models_unwrapped(module)
    accumulate = module.Accelerator.accumulate

    def step(self, *models):
        write_down(last["batch"])
        return accumulate(self, *models)

    module.Accelerator.accumulate = step


def after_import():
    """{module: what to do when it was imported}."""
    found = {}
    if os.environ.get("RECORD_DIR"):
        found["torch.utils.data.dataloader"] = lambda module: remember_batches(module.DataLoader)
        found["accelerate.data_loader"] = lambda module: remember_batches(module.DataLoaderShard, module.SkipDataLoader)
        found["accelerate.accelerator"] = record_steps
    if os.environ.get("SMALL_MODELS"):
        import small_families
        import small_flow_models

        found |= {"library.model_util": small_checkpoint, "library.original_unet": small_unet}
        found |= {"diffusers.models.controlnets.controlnet": small_controlnet}
        found |= {"diffusers.models.controlnet": small_controlnet}  # where older ones have it
        found |= small_families.AFTER_IMPORT | small_flow_models.AFTER_IMPORT
    return found


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.after = after_import()

    def find_spec(self, name, path=None, target=None):
        then = self.after.pop(name, None)
        spec = importlib.util.find_spec(name) if then else None
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), then(module))
        return spec


sys.meta_path.insert(0, Finder())
