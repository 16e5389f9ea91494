"""anima_lora's own `train.py` with a tiny model, and every batch that it trains written down.

anima_lora_training.py OUT [train.py's arguments]        started by test_anima_lora.py, with the launcher or without

Transformer and autoencoder are made up, since there are no weights; datasets, config files, caches, loaders, the
training loop and its saved states are the real ones. With OUT/dies in place, the process ends when a state is saved.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from absent_packages import pass_over_absent
from recording import leave_frozen_models_unwrapped

ROOT = os.environ["ANIMA_LORA_DIR"]


def tiny_transformer(*args: Any, **kwargs: Any) -> Any:
    from library.anima.models import Anima

    return Anima(
        64, 64, 1, 16, 16, 2, 1, model_channels=32, num_blocks=2, num_heads=2, crossattn_emb_channels=16,
        adaln_lora_dim=4, use_llm_adapter=False, attn_mode="torch",
    )  # fmt: skip


def tiny_autoencoder(*args: Any, **kwargs: Any) -> Any:
    import torch

    class Pooled(torch.nn.Module):
        dtype, device = torch.float32, torch.device("cpu")

        def encode_pixels_to_latents(self, pixels: Any) -> Any:
            return torch.nn.functional.avg_pool2d(pixels, 8).mean(1, keepdim=True).repeat(1, 16, 1, 1)

    return Pooled()


def write_batches(trainer: Any, out: str) -> None:
    train_one = trainer.process_batch

    def process_batch(self: Any, ctx: Any, batch: Any, *more: Any, **given: Any) -> Any:
        pixels = batch["images"] if batch["latents"] is None else batch["latents"]
        row = {
            "keys": [os.path.basename(key) for key in batch["image_keys"]],
            "shape": list(pixels.shape),
            "flips": batch["flippeds"],
            "sums": [round(float(one.double().sum()), 3) for one in pixels],
            "weights": batch["loss_weights"].tolist(),
            "training": bool(given.get("is_train", True)),
        }
        with open(os.path.join(out, f"rank{os.environ.get('RANK', '0')}.jsonl"), "a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        return train_one(self, ctx, batch, *more, **given)

    trainer.process_batch = process_batch


def die_when_saved(out: str) -> None:
    from accelerate import Accelerator

    save = Accelerator.save_state

    def save_and_die(self: Any, *args: Any, **kwargs: Any) -> Any:
        save(self, *args, **kwargs)
        os._exit(9)  # of the first process, which alone saves; the others end without it

    if os.path.exists(os.path.join(out, "dies")):
        Accelerator.save_state = save_and_die


def main() -> None:
    out, sys.argv = sys.argv[1], [os.path.join(ROOT, "train.py"), *sys.argv[2:]]
    sys.path.insert(0, ROOT)
    os.environ["ANIMA_HOME"] = ROOT
    pass_over_absent()
    import train
    from accelerate import accelerator
    from library.anima import strategy, weights
    from library.models import qwen_vae

    weights.load_anima_model, qwen_vae.load_vae = tiny_transformer, tiny_autoencoder
    strategy.AnimaTokenizeStrategy = lambda **_: SimpleNamespace(qwen3_tokenizer=None)
    write_batches(train.AnimaTrainer, out)
    die_when_saved(out)
    leave_frozen_models_unwrapped(accelerator)
    parser = train.setup_parser()
    arguments = parser.parse_args()
    train.verify_command_line_training_args(arguments)
    train.AnimaTrainer().train(train.read_config_from_file(arguments, parser))


if __name__ == "__main__":
    main()
