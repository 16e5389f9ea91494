"""sd-scripts' real `train_network.py`, with its own loop and LoRA, around a model of one layer: no checkpoint needed.

Run by `test_sdscripts_initial_step.py`, alone or under `torch.distributed.run`; not a test by itself.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.dont_write_bytecode = True
sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
sys.path.insert(0, str(Path(__file__).parent))

from kohya_bucket import sdscripts  # noqa: E402

sdscripts.install()
import torch  # noqa: E402
import train_network  # noqa: E402
from library import train_util  # noqa: E402
from recording import leave_frozen_models_unwrapped, write_down  # noqa: E402
from sdscripts_support import MeanVAE, StubTokenizer  # noqa: E402

leave_frozen_models_unwrapped()


class Transformer2DModel(torch.nn.Module):
    """Named as the blocks are whose layers a LoRA is put on."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)

    def forward(self, latents):
        return self.proj(latents.movedim(1, -1)).movedim(-1, 1)


class SmallModel(torch.nn.Module):
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.block = Transformer2DModel()
        self.text = torch.nn.ParameterList([torch.zeros(1) for _ in range(3)])

    def forward(self, latents):
        return self.block(latents.float())


class SmallVAE(MeanVAE):
    def set_use_memory_efficient_attention_xformers(self, _):
        pass


class SmallTrainer(train_network.NetworkTrainer):
    def load_target_model(self, args, weight_dtype, accelerator):
        torch.manual_seed(0)
        return "sd_v1", SmallModel(), SmallVAE(), SmallModel()

    def load_tokenizer(self, args):
        return StubTokenizer()

    def get_tokenize_strategy(self, args):
        strategy = StubTokenizer()
        strategy.tokenizer = strategy
        return strategy

    def get_text_encoding_strategy(self, args):
        return SimpleNamespace(encode_tokens=lambda *_: [None])

    def get_text_cond(self, *_):
        return None

    def sample_images(self, *_):
        pass

    def call_unet(self, args, accelerator, unet, noisy_latents, timesteps, text_conds, batch, weight_dtype, **_):
        write_down(batch, noisy_latents)
        return unet(noisy_latents)


parser = train_network.setup_parser()
arguments = train_util.read_config_from_file(parser.parse_args(), parser)
SmallTrainer().train(arguments)
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # torch's gloo threads now and then abort a process that ends in good order
