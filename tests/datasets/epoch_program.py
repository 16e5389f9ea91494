"""One rank of a run through accelerate that is saved and resumed; started from test_epochs_resumed.py.

    epoch_program.py RANK RANKS STORE save FOLDER      trains epochs 0 to 4 and saves states
    epoch_program.py RANK RANKS STORE resume FOLDER    a fresh program that goes on from each of them

One process goes through all ways to set accelerate, one after the other, and writes a line of JSON per batch.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import rank_program
import torch
from rank_program import Log, rank_of
from torch.utils.data import DataLoader

from kohya_bucket import BucketBatchSampler, prepare_loader
from kohya_bucket.errors import PlanError

IDS = np.random.RandomState(5).choice(4, 37, p=[0.5, 0.3, 0.15, 0.05])
BATCH, EPOCHS, STOP = 2, 5, 4
SAVED = (0, 1, 4)  # the epochs in which a state is saved, after STOP steps


class Images(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> int:
        return index


def ways() -> list[dict]:
    """What of accelerate a run can choose, where every step must be the planned one."""
    from accelerate.utils import DataLoaderConfiguration

    stateful = [False, True] if "use_stateful_dataloader" in DataLoaderConfiguration.__dataclass_fields__ else [False]
    return [
        {"stateful": s, "registered": r, "even": even, "workers": workers}
        for s, r, even, workers in itertools.product(stateful, [True, False], [True, False], [0, 2])
        if (s or r) and (not workers or (r and even))
    ]


def name_of(way: dict) -> str:
    return "-".join(f"{key}{int(value)}" for key, value in way.items())


def prepared(way: dict) -> tuple:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    stateful = {"use_stateful_dataloader": True} if way["stateful"] else {}
    settings = DataLoaderConfiguration(even_batches=way["even"], **stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    torch.manual_seed(3)
    sampler = BucketBatchSampler(IDS, BATCH, seed=7)
    plain = DataLoader(Images(), batch_sampler=sampler, num_workers=way["workers"])
    loader = accelerator.prepare(prepare_loader(accelerator, plain))  # once more does no harm
    if way["registered"]:
        accelerator.register_for_checkpointing(sampler)
    return accelerator, sampler, loader


def save(folder: Path) -> None:
    from accelerate import __version__

    for way in ways():
        accelerator, _, loader = prepared(way)
        log = Log(folder, accelerator.process_index)
        log.write(accelerate=__version__, ranks=accelerator.num_processes, length=len(loader))

        def state(where, accelerator=accelerator, way=way):
            accelerator.wait_for_everyone()
            accelerator.save_state(str(folder / f"{name_of(way)}-{where}"))
            accelerator.wait_for_everyone()

        for epoch in range(EPOCHS):
            for step, batch in enumerate(loader, 1):
                log.write(way=name_of(way), epoch=epoch, images=batch.tolist())
                if epoch in SAVED and step == STOP:
                    state(f"{epoch}")
                if epoch == 1 and step == len(loader):
                    state("last")
            if epoch == 1:
                state("after")
    refusals(log)


def refusals(log: Log) -> None:
    """What would tear batches apart stops before the first batch, however it is combined."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    ways = [(*way, 0, False) for way in itertools.product([None, False, True], [False, True], [True, False])]
    if "use_stateful_dataloader" in DataLoaderConfiguration.__dataclass_fields__:
        ways += [(None, split, True, workers, True) for split in (False, True) for workers in (0, 2)]
    for dispatch, split, even, workers, stateful in ways:
        more = {"use_stateful_dataloader": True} if stateful else {}
        settings = DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split, even_batches=even, **more)
        accelerator = Accelerator(cpu=True, dataloader_config=settings)
        for prepare in (prepare_loader, Accelerator.prepare_data_loader, Accelerator.prepare):
            sampler = BucketBatchSampler(IDS, BATCH * accelerator.num_processes)
            loader, refused = DataLoader(Images(), batch_sampler=sampler, num_workers=workers), ""
            try:
                made = prepare(accelerator, loader)
                if accelerator.is_main_process or not dispatch:  # others wait for what the first process reads
                    next(iter(made))
            except (PlanError, ValueError) as error:
                refused = str(error)
            log.write(way=[prepare.__name__, dispatch, split, even], refused=refused)


def resume(folder: Path) -> None:
    for way in ways():
        for where in (*map(str, SAVED), "last", "after"):
            accelerator, sampler, loader = prepared(way)
            log = Log(folder, accelerator.process_index)
            accelerator.load_state(str(folder / f"{name_of(way)}-{where}"))
            plan = sampler.plan()
            log.write(way=name_of(way), resumed=where, at=[plan.epoch, plan.first_step])
            for epoch in (sampler.epoch, sampler.epoch + 1):
                for batch in loader:
                    log.write(way=name_of(way), resumed=where, epoch=epoch, images=batch.tolist())


rank_program.PARTS.update(save=save, resume=resume)

if __name__ == "__main__":
    rank, ranks, store, part, folder = sys.argv[1:]
    rank_of(int(rank), int(ranks), Path(store), part, Path(folder))
