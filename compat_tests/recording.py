"""What the recording trainers share: writing down what is trained, and running on several CPU processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import accelerate


def write_down(batch: dict[str, Any], latents: Any) -> None:
    """Add a batch's images and their size in pixels to this process's file in the folder `RECORD_DIR`."""
    row = {
        "images": [caption.split(",")[0] for caption in batch["captions"]],
        "size": [side * 8 for side in reversed(latents.shape[2:])],
    }
    file = Path(os.environ["RECORD_DIR"]) / f"rank{os.environ.get('RANK', '0')}.jsonl"
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def recorded(folder: Path) -> list[tuple[dict[str, Any], ...]]:
    """Batches in the order they were trained, with one row for each process."""
    files = sorted(folder.glob("rank*.jsonl"))
    rows = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    return list(zip(*rows, strict=True))


def leave_frozen_models_unwrapped() -> None:
    """On CPU accelerate wraps frozen models too, which torch refuses; on GPUs it leaves them alone."""
    prepare_model = accelerate.Accelerator.prepare_model

    def prepare(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.num_processes > 1 and not any(p.requires_grad for p in model.parameters()):
            kwargs["evaluation_mode"] = True
        return prepare_model(self, model, *args, **kwargs)

    accelerate.Accelerator.prepare_model = prepare
