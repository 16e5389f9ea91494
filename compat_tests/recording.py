"""What is trained, step by step: written down in the trainer's processes (`small_models`), read by the tests."""

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any


def write_down(batch: dict[str, Any]) -> None:
    """Add a batch to a file of this process in `RECORD_DIR`: its images, their size in pixels and their weights, and
    for each image the mean of the first channel of its pixels, or of its latents.
    """
    latents = batch.get("latents")
    shape = batch["images"].shape[2:] if latents is None else [side * 8 for side in latents.shape[-2:]]
    row = {"images": [caption.split(",")[0] for caption in batch["captions"]], "size": [shape[1], shape[0]]}
    row["weights"] = batch["loss_weights"].tolist()
    row["means"] = [float(one[0].double().mean()) for one in (batch["images"] if latents is None else latents)]
    file = Path(os.environ["RECORD_DIR"]) / f"rank{os.environ.get('RANK', '0')}.jsonl"
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def recorded(folder: Path) -> list[tuple[dict[str, Any], ...]]:
    """Batches in the order they were trained, with one row for each process."""
    files = sorted(folder.glob("rank*.jsonl"))
    rows = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    return list(zip(*rows, strict=True))


def leave_frozen_models_unwrapped(accelerator: ModuleType) -> None:
    """On CPU accelerate wraps frozen models too, which torch refuses; on GPUs it leaves them alone."""
    prepare_model = accelerator.Accelerator.prepare_model

    def prepare(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.num_processes > 1 and not any(p.requires_grad for p in model.parameters()):
            kwargs["evaluation_mode"] = True
        return prepare_model(self, model, *args, **kwargs)

    accelerator.Accelerator.prepare_model = prepare
