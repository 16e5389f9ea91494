"""sd-scripts' real `train_network.py` with the adapter, writing down what every process trains in every step.

Run by `test_sdscripts_training.py`, alone or under `torch.distributed.run`; not a test by itself. The folder in
`RECORD_DIR` gets one file per process, a line of JSON for each batch.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])

from kohya_bucket import sdscripts

sdscripts.install()
import accelerate  # noqa: E402
import train_network  # noqa: E402
from library import train_util  # noqa: E402

prepare_model = accelerate.Accelerator.prepare_model


def prepare_without_frozen(self, model, *args, **kwargs):
    """On CPU accelerate wraps frozen models too, which torch refuses; on GPUs it leaves them alone."""
    if self.num_processes > 1 and not any(p.requires_grad for p in model.parameters()):
        kwargs["evaluation_mode"] = True
    return prepare_model(self, model, *args, **kwargs)


accelerate.Accelerator.prepare_model = prepare_without_frozen


class RecordingTrainer(train_network.NetworkTrainer):
    def process_batch(self, batch, *args, **kwargs):
        rank = os.environ.get("RANK", "0")
        row = {"images": [caption.split(",")[0] for caption in batch["captions"]]}
        row["size"] = [side * 8 for side in reversed(batch["latents"].shape[2:])]
        with (Path(os.environ["RECORD_DIR"]) / f"rank{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return super().process_batch(batch, *args, **kwargs)


parser = train_network.setup_parser()
arguments = train_util.read_config_from_file(parser.parse_args(), parser)
RecordingTrainer().train(arguments)
