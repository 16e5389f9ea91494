"""One rank that runs a training program and writes down what it trains: FOLDER HOLD_AT PROGRAM ARGUMENTS.

After each step it adds a line to FOLDER/rankN.jsonl. Before step HOLD_AT, counted over the run from 1, the ranks of the
second node stop, say so by a file, and wait until they are killed; 0 holds none.
"""

import json
import os
import runpy
import sys
import threading
from pathlib import Path

from accelerate.data_loader import DataLoaderShard


def record(folder: Path, hold_at: int) -> None:
    rank = os.environ["RANK"]
    held = int(os.environ.get("GROUP_RANK", "0")) == 1
    read = DataLoaderShard.__iter__
    steps = 0

    def recorded(self):
        nonlocal steps
        for batch in read(self):
            steps += 1
            if held and steps == hold_at:
                (folder / f"held{rank}").write_text(str(os.getpid()), encoding="utf-8")
                threading.Event().wait()
            yield batch
            line = {"step": steps, "images": batch["path"], "shape": list(batch["latents"].shape[1:])}
            with open(folder / f"rank{rank}.jsonl", "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    DataLoaderShard.__iter__ = recorded


if __name__ == "__main__":
    record(Path(sys.argv[1]), int(sys.argv[2]))
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # everything is stored; gloo's threads now and then abort a process that ends in good order
