"""Run by `test_diffusers_examples.py`: a DreamBooth script of diffusers without its models, in each process of a run.

`diffusers_script.py SPEC.json` takes dataset, collate function, sampler and the statements of `main` that make the
loader, resume and loop out of the script's file, and runs them as they are; a batch is written down where the models
would train it. Nothing of diffusers has to be installed.
"""

import ast
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
import types
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
from PIL import Image
from PIL.ImageOps import exif_transpose
from torch.utils.data import Dataset
from torch.utils.data.sampler import BatchSampler
from torchvision import transforms
from torchvision.transforms import functional as TF


class Arguments(types.SimpleNamespace):
    """The script's, where what is not given is None."""

    def __getattr__(self, name):
        return None


def taken(file, wanted):
    """Top-level definitions of a file."""
    return [node for node in ast.parse(file.read_text(encoding="utf-8")).body if getattr(node, "name", "") in wanted]


def statements_of_main(file):
    """{what it assigns, `resume` or `loop`: the last such statement of the script's `main`}."""
    (main,) = taken(file, {"main"})
    found = {}
    for node in main.body:
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = node
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "args.resume_from_checkpoint":
            found["resume"] = node
        elif isinstance(node, ast.For) and ast.unparse(node.target) == "epoch":
            found["loop"] = node
    return found


def without_models(loop):
    """The script's loop, where a batch is written down in place of being trained."""
    for node in ast.walk(loop):
        if isinstance(node, ast.With) and "accelerator.accumulate" in ast.unparse(node.items[0]):
            node.body = ast.parse("loss = train(batch)").body
            return loop
    raise AssertionError("the script's loop does not accumulate")


def of_the_page(page):
    """(imports, the sampler, its loader, what stands before the loop): the lines that the page adds to a script."""
    added = re.findall(r"^\+ *(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    number = next(i for i, line in enumerate(added) if line.startswith("batch_sampler ="))
    parts = (added[:number], [added[number]], [added[number + 1]], added[number + 2 :])
    return ["\n".join(lines) for lines in parts]


def main(spec):
    script, root = Path(spec["script"]), Path(spec["diffusers"])
    args = Arguments(**spec["args"])
    set_seed(args.seed)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    names = {
        "__name__": "script", "args": args, "accelerator": accelerator, "Dataset": Dataset,
        "BatchSampler": BatchSampler, "Image": Image, "Path": Path, "TF": TF, "exif_transpose": exif_transpose,
        "itertools": itertools, "math": math,
        "os": os, "random": random, "shutil": shutil, "torch": torch, "transforms": transforms,
        "DistributedType": DistributedType, "is_fsdp": False,
        "buckets": [tuple(bucket) for bucket in spec["buckets"]], "use_aspect_ratio_buckets": False, "global_step": 0,
        "first_epoch": 0, "logger": types.SimpleNamespace(info=print), "kontext_base_resolutions": None,
        "progress_bar": types.SimpleNamespace(update=int, set_postfix=dict),
        "lr_scheduler": types.SimpleNamespace(get_last_lr=lambda: [0.0]),
    }  # fmt: skip

    def execute(nodes):
        exec(compile(ast.fix_missing_locations(ast.Module(nodes, [])), str(script), "exec"), names)

    execute(ast.parse("from __future__ import annotations").body)
    execute(taken(root / "src/diffusers/training_utils.py", {"find_nearest_bucket"}))
    execute(taken(script, {"DreamBoothDataset", "collate_fn", "BucketBatchSampler"}))
    found = statements_of_main(script)
    imports, sampler, loader, before_loop = of_the_page(Path(spec["page"])) if spec["ours"] else ("", "", "", "")
    execute(ast.parse(imports).body)
    execute([found["train_dataset"], *filter(None, [found.get("has_step_indexed_caches")])])
    execute(ast.parse(sampler).body or [found["batch_sampler"]])
    execute([found["train_dataloader"], *ast.parse(loader).body])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    model, optimizer, names["train_dataloader"] = accelerator.prepare(model, optimizer, names["train_dataloader"])
    rows = []

    def train(batch):
        pixels = batch["pixel_values"]
        items = ((pixels[:, 0].flatten(1).mean(1) + 1) * 127.5).round().int().tolist()
        rows.append({"epoch": names["epoch"], "items": items, "size": list(pixels.shape[-2:])})
        loss = model(torch.zeros(1)).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    names |= {"train": train, "transformer": model}
    updates = math.ceil(len(names["train_dataloader"]) / args.gradient_accumulation_steps)
    args.max_train_steps = args.max_train_steps or args.num_train_epochs * updates  # the script has this twice
    execute([found["num_update_steps_per_epoch"], found["args.num_train_epochs"], found["resume"]])
    execute(ast.parse(before_loop).body)
    execute([without_models(found["loop"])])
    Path(spec["out"], f"{accelerator.process_index}.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
