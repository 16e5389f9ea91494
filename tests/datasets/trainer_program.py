"""One rank of a run by transformers' Trainer, Lightning or Fabric; started from test_trainers_of_others.py.

    trainer_program.py RANK RANKS PORT TRAINER FOLDER WORKERS whole     three epochs, saved in the middle of the second
    trainer_program.py RANK RANKS PORT TRAINER FOLDER WORKERS resume    a fresh program that goes on from there

With STOP=0 in the environment, the state is that of the first epoch's end.

Every rank writes the images of each batch that it trains into FOLDER, a line of JSON for each.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from kohya_bucket import BucketBatchSampler, prepare_loader
from kohya_bucket.buckets import Bucket
from kohya_bucket.datasets.items import register_bucket_collation
from kohya_bucket.errors import PlanError

IDS = np.random.RandomState(5).choice(4, 37, p=[0.5, 0.3, 0.15, 0.05])
BATCH, EPOCHS = 2, 3
STOP = int(os.environ.get("STOP", "4"))  # steps of the second epoch after which a state is saved


class Items(Dataset):
    """Items as `BucketedDataset` makes them, as far as a trainer handles them by itself."""

    bucket_indices = IDS

    def __init__(self) -> None:
        register_bucket_collation()

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": torch.tensor([float(index)]), "bucket": Bucket(64, 64), "caption": "a photo"}


def batches(workers: int, accelerator: Any = None) -> DataLoader:
    dataset = Items()
    loader = DataLoader(dataset, batch_sampler=BucketBatchSampler(dataset, BATCH, seed=7), num_workers=workers)
    return loader if accelerator is None else prepare_loader(accelerator, loader)


def write(folder: Path, epoch: int, batch: dict[str, Any]) -> None:
    assert batch["bucket"] == [Bucket(64, 64)] * len(batch["image"])
    with (folder / f"rank{sys.argv[1]}.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps([epoch, batch["image"][:, 0].int().tolist()]) + "\n")


def by_trainer(folder: Path, workers: int, part: str, *, plain: bool = False) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
            write(folder, int(trainer.state.epoch or 0), batch)
            return {"loss": (self.weight - batch["image"]).square().mean()}

    class Planned(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return batches(workers, None if plain else self.accelerator)

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    saved = len(BucketBatchSampler(IDS, BATCH, num_replicas=ranks, rank=0)) + STOP
    trainer = Planned(
        Model(), TrainingArguments(
            str(folder / "states"), num_train_epochs=EPOCHS, save_steps=saved, use_cpu=True, report_to=[],
            remove_unused_columns=False, save_only_model=True, disable_tqdm=True,
            ddp_backend="gloo" if ranks > 1 else None,
        ), train_dataset=Items(),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(folder / "states" / f"checkpoint-{saved}") if part == "resume" else None)


def devices() -> dict[str, Any]:
    """What Lightning and Fabric are told of the processes that run here."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return {"accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}


def by_lightning(folder: Path, workers: int, part: str) -> None:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: dict[str, Any], step: int) -> torch.Tensor:
            write(folder, self.current_epoch, batch)
            if part == "whole" and (self.current_epoch, step) == (1, STOP - 1):
                state = loader.batch_sampler.state_dict(step=step + 1)
                (folder / "position.json").write_text(json.dumps(state), encoding="utf-8")
            return (self.weight - batch["image"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    loader, epochs = batches(workers), EPOCHS
    if part == "resume":
        loader.batch_sampler.load_state_dict(json.loads((folder / "position.json").read_text(encoding="utf-8")))
        epochs -= loader.batch_sampler.epoch
    trainer = lightning.Trainer(
        max_epochs=epochs, **devices(), use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), loader)


def by_fabric(folder: Path, workers: int, part: str) -> None:
    import lightning

    fabric = lightning.Fabric(**devices())
    fabric.launch()
    plain = batches(workers)
    loader, sampler = fabric.setup_dataloaders(plain, use_distributed_sampler=False), plain.batch_sampler
    if part == "resume":
        sampler.load_state_dict(json.loads((folder / "position.json").read_text(encoding="utf-8")))
    for epoch in range(sampler.epoch, EPOCHS):
        for step, batch in enumerate(loader, 1):
            write(folder, epoch, batch)
            if part == "whole" and (epoch, step) == (1, STOP):
                (folder / "position.json").write_text(json.dumps(sampler.state_dict(step=step)), encoding="utf-8")


WAYS = {
    "trainer": by_trainer,
    "trainer, plain loader": lambda *given: by_trainer(*given, plain=True),
    "lightning": by_lightning,
    "fabric": by_fabric,
}

if __name__ == "__main__":
    rank, ranks, port, way, folder, workers, part = sys.argv[1:]
    if ranks != "1":
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, **address}
    try:
        WAYS[way](Path(folder), int(workers), part)
    except PlanError as error:
        with (Path(folder) / f"rank{rank}.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(["refused", str(error)]) + "\n")
