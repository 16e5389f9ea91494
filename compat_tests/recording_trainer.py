"""sd-scripts' real `train_network.py` with the adapter, writing down what every process trains in every step.

Run by `test_sdscripts_training.py`, alone or under `torch.distributed.run`; not a test by itself.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
sys.path.insert(0, str(Path(__file__).parent))

from kohya_bucket import sdscripts

sdscripts.install()
import train_network  # noqa: E402
from library import train_util  # noqa: E402
from recording import leave_frozen_models_unwrapped, write_down  # noqa: E402

leave_frozen_models_unwrapped()


class RecordingTrainer(train_network.NetworkTrainer):
    def call_unet(self, args, accelerator, unet, noisy_latents, timesteps, text_conds, batch, *rest, **kwargs):
        write_down(batch, noisy_latents)
        return super().call_unet(args, accelerator, unet, noisy_latents, timesteps, text_conds, batch, *rest, **kwargs)


parser = train_network.setup_parser()
arguments = train_util.read_config_from_file(parser.parse_args(), parser)
RecordingTrainer().train(arguments)
