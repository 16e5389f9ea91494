"""A trainer in small: sd-scripts' real group, collator, loader call and accelerator around a model of one weight.

Run by `test_sdscripts_resume.py`, alone or under `torch.distributed.run`; not a test by itself.
"""

import argparse
import json
from multiprocessing import Value
from pathlib import Path

import torch
from sdscripts_rank import accelerator_of, end, sd
from sdscripts_support import build_groups

parser = argparse.ArgumentParser()
parser.add_argument("config", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save-at", type=int, help="save a state after this update, and end as if killed")
parser.add_argument("--state", type=Path, default=Path("state"))
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

accelerator = accelerator_of("--gradient_accumulation_steps", str(options.accumulate))
config = json.loads(options.config.read_text(encoding="utf-8"))
config["datasets"][0]["batch_size"] = options.batch_size
group, _ = build_groups(sd, config, seed=options.seed)
for dataset in group.datasets:
    dataset.debug_dataset = True
epoch, step = Value("i", 0), Value("i", 0)
collator = sd.train_util.collator_class(epoch, step, group if options.workers == 0 else None)
loader = torch.utils.data.DataLoader(
    group, batch_size=1, shuffle=True, collate_fn=collator, num_workers=options.workers
)
model = torch.nn.Linear(1, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
rank = accelerator.process_index
rows, updates = [], 0
if options.resume:
    accelerator.load_state(str(options.state))


def finish() -> None:
    accelerator.wait_for_everyone()
    end(options.out, rank, rows)


for number in range(options.epochs):
    epoch.value = number + 1
    for batch in loader:
        step.value = updates
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
        keys = [Path(key).name for key in batch["image_keys"]]
        rows.append({"rank": rank, "shape": list(batch["images"].shape[2:]), "keys": keys, "epoch": number + 1})
        updates += accelerator.sync_gradients
        if options.save_at is not None and updates == options.save_at:
            accelerator.save_state(str(options.state))
            finish()
finish()
