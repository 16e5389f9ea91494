"""A whole job of ai-toolkit's own `run.py` with a tiny model, and every batch that it trains written down.

ai_toolkit_job.py OUT JOB.json        in the folder of a checkout; started by test_ai_toolkit_job.py. With DIES_AT=N the
process ends in its Nth step; with WHITE_IS_NAN the VAE makes NaN of an image that is all white.
"""

import json
import os
import runpy
import sys
import types
from typing import Any

from absent_packages import pass_over_absent
from recording import leave_frozen_models_unwrapped

OUT = sys.argv[1]
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
sys.path.insert(0, os.getcwd())


def tiny_model() -> type:
    """A model of the kind that an extension brings, without weights of anybody."""
    import torch
    from toolkit.advanced_prompt_embeds import AdvancedPromptEmbeds
    from toolkit.models.base_model import BaseModel
    from toolkit.samplers.custom_flowmatch_sampler import CustomFlowMatchEulerDiscreteScheduler

    class TinyTransformer2DModel(torch.nn.Module):
        dtype, device = torch.float32, torch.device("cpu")

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

        def forward(self, latents: Any) -> Any:
            return self.last(self.first(latents.movedim(1, -1))).movedim(-1, 1)

    class Frozen(torch.nn.Module):
        dtype, device = torch.float32, torch.device("cpu")

    class Tiny(BaseModel):
        arch = "tiny"

        def __init__(self, device: Any, config: Any = None, dtype: Any = "float32", *more: Any, **given: Any) -> None:
            super().__init__(device, given.pop("model_config", config), dtype, *more, **given)
            self.is_flow_matching = self.is_transformer = True
            self.target_lora_modules = ["TinyTransformer2DModel"]

        @staticmethod
        def get_train_scheduler() -> Any:
            return CustomFlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)

        def get_bucket_divisibility(self) -> int:
            return 16

        def load_model(self) -> None:
            self.noise_scheduler = self.get_train_scheduler()
            self.vae, self.text_encoder, self.tokenizer = Frozen(), Frozen(), None
            self.model, self.pipeline = TinyTransformer2DModel(), None

        def encode_images(self, images: Any, **_: Any) -> Any:
            stacked = torch.stack(list(images)) if isinstance(images, list) else images
            latents = torch.nn.functional.avg_pool2d(stacked, 8).mean(1, keepdim=True).repeat(1, 4, 1, 1)
            white = (latents > 0.999).all() and "WHITE_IS_NAN" in os.environ
            return latents * float("nan") if white else latents

        def get_prompt_embeds(self, prompt: Any, **_: Any) -> Any:
            prompts = [prompt] if isinstance(prompt, str) else prompt
            return AdvancedPromptEmbeds(text_embeds=[torch.zeros(4, 8) for _ in prompts])

        def get_noise_prediction(self, latent_model_input: Any, timestep: Any, text_embeddings: Any, **_: Any) -> Any:
            return self.model(latent_model_input)

        def get_loss_target(self, *_: Any, **given: Any) -> Any:
            return (given["noise"] - given["batch"].latents).detach()

        def get_model_has_grad(self) -> bool:
            return False

        get_te_has_grad = get_model_has_grad

    return Tiny


def write_batches(trainer: Any) -> None:
    train_one = trainer.hook_train_loop

    def hook_train_loop(self: Any, batches: Any) -> Any:
        for batch in batches if isinstance(batches, list) else [batches]:
            row = [os.path.basename(item.path) for item in batch.file_items]
            with open(os.path.join(OUT, f"rank{os.environ.get('RANK', '0')}.jsonl"), "a", encoding="utf-8") as log:
                means = [] if batch.latents is None else batch.latents.mean(dim=(1, 2, 3)).tolist()
                log.write(json.dumps({"step": self.step_num, "keys": row, "means": means}) + "\n")
        if int(os.environ.get("DIES_AT") or 0) == self.step_num + 1:
            os._exit(9)
        return train_one(self, batches)

    trainer.hook_train_loop = hook_train_loop


def main() -> None:
    pass_over_absent()
    sys.modules["extensions_built_in.diffusion_models"] = types.ModuleType("models")  # which need what is absent
    from accelerate import accelerator
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer
    from toolkit.util import get_model

    get_model.BUILT_IN_MODELS.append(tiny_model())
    write_batches(SDTrainer)
    leave_frozen_models_unwrapped(accelerator)
    sys.argv = ["run.py", sys.argv[2]]
    runpy.run_path("run.py", run_name="__main__")


if __name__ == "__main__":
    main()
