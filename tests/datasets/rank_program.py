"""One rank of a small training run; started from test_sampler_on_ranks.py, as a process or by `torch.distributed.run`.

    rank_program.py train FOLDER BATCH_SIZE EPOCHS [KILL_EPOCH KILL_STEP]   through accelerate
    rank_program.py plain FOLDER BATCH_SIZE EPOCHS                          with torch alone, then ranks that differ

Every rank writes one line of JSON per batch into FOLDER; rank 0 saves the position after every step.
"""

import json
import os
import shutil
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from kohya_bucket import BucketedDataset, BucketedLatentDataset, KohyaBuckets
from kohya_bucket.datasets import agreement
from kohya_bucket.datasets.accelerated import prepare_loader
from kohya_bucket.datasets.sampler import BucketBatchSampler
from kohya_bucket.errors import PlanError
from kohya_bucket.planning import plan_epoch

WAITS = 500  # seconds, as the ranks' process group is told
IDS = np.random.RandomState(3).choice(5, 103, p=[0.5, 0.3, 0.1, 0.07, 0.03])


class Numbers(Dataset):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, int(IDS[index])])


class Log:
    def __init__(self, folder: Path, rank: int) -> None:
        self.file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8")

    def write(self, **entry: object) -> None:
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()


def train(folder: Path, batch_size: int, epochs: int, kill_epoch: int = -1, kill_step: int = -1) -> None:
    from accelerate import Accelerator, __version__

    accelerator = Accelerator(cpu=True)
    log = Log(folder, accelerator.process_index)
    log.write(accelerate=__version__, ranks=accelerator.num_processes)
    sampler = BucketBatchSampler(IDS, batch_size, step_shapes="one")
    saved = folder / "position.json"
    step = 0
    if saved.exists():
        sampler.load_state_dict(json.loads(saved.read_text(encoding="utf-8")))
        step = sampler.plan().first_step
    loader = prepare_loader(accelerator, DataLoader(Numbers(), batch_sampler=sampler))
    log.write(length=len(loader))
    for epoch in range(sampler.epoch, epochs):
        for batch in loader:
            step += 1
            log.write(epoch=epoch, step=step, images=batch[:, 0].tolist(), buckets=batch[:, 1].tolist())
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                part = folder / "position.part"
                part.write_text(json.dumps(sampler.state_dict(step=step)), encoding="utf-8")
                part.replace(saved)
            accelerator.wait_for_everyone()
            if (epoch, step) == (kill_epoch, kill_step):
                os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
        step = 0
    if kill_epoch < 0 and not saved.exists():
        return
    accelerator.wait_for_everyone()
    skip_and_count(accelerator, batch_size, log)


def skip_and_count(accelerator, batch_size: int, log: Log) -> None:
    """accelerate's own way to resume: its loader skips batches of an epoch that the sampler was told."""
    sampler = BucketBatchSampler(IDS, batch_size, step_shapes="one")
    loader = prepare_loader(accelerator, DataLoader(Numbers(), batch_sampler=sampler))
    sampler.set_epoch(5)
    step = 4
    for batch in accelerator.skip_first_batches(loader, num_batches=step):
        step += 1
        log.write(epoch=5, step=step, images=batch[:, 0].tolist(), buckets=batch[:, 1].tolist())
    # What ranks trained, gathered: tensors where all have as many images, objects always. (`gather_for_metrics` cuts
    # the last batch: it takes what is beyond a multiple of the batch size for repeats.)
    from accelerate.utils import gather_object

    for remainder in ("pad", "keep"):
        sampler = BucketBatchSampler(IDS, batch_size, remainder=remainder, step_shapes="one")
        loader = prepare_loader(accelerator, DataLoader(Numbers(), batch_sampler=sampler))
        for batch in loader:
            images = batch[:, 0]
            padded = remainder == "pad"
            together = accelerator.gather(images).tolist() if padded else gather_object(images.tolist())
            log.write(gathered=remainder, together=together)


def plain(folder: Path, batch_size: int, epochs: int) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=WAITS))
    rank = dist.get_rank()
    log = Log(folder, rank)
    loader = DataLoader(Numbers(), batch_sampler=BucketBatchSampler(IDS, batch_size, step_shapes="one"))
    for epoch in range(epochs):
        for step, batch in enumerate(loader, 1):
            log.write(epoch=epoch, step=step, images=batch[:, 0].tolist(), buckets=batch[:, 1].tolist())
    last = rank == dist.get_world_size() - 1
    for ids, options in (
        (np.delete(IDS, 0) if last else IDS, {}),
        (IDS, {"seed": 4 if last else 3}),
        (IDS, {"order": "runs" if last else "sorted"}),
    ):
        try:
            next(iter(BucketBatchSampler(ids, batch_size, step_shapes="one", **options)))
        except PlanError as error:
            log.write(refused=str(error))
    # Last of all, a rank that does not come at all: it waits until the others have given up.
    assert agreement.time_out() == timedelta(seconds=WAITS)
    agreement.time_out = lambda: timedelta(seconds=3)
    if last:
        while len(list(folder.glob("gave_up*"))) < dist.get_world_size() - 1:
            time.sleep(0.05)
        return
    try:
        next(iter(BucketBatchSampler(IDS, batch_size, step_shapes="one")))
    except PlanError as error:
        log.write(alone=str(error))
    (folder / f"gave_up{rank}").touch()


def gradients(folder: Path, global_batch: int) -> None:
    """The gradient of each step as DDP averages it: of plain means, and with the plan's scale."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, world = dist.get_rank(), dist.get_world_size()
    plan = plan_epoch(IDS, global_batch // world, world_size=world, step_shapes="one")
    model = DistributedDataParallel(small_model())
    found = {"plain": [], "scaled": []}
    for step in range(plan.steps):
        for kind, scale in (("plain", 1.0), ("scaled", plan.loss_scale(step, rank))):
            model.zero_grad()
            (loss_of(model, plan.indices(step, rank)) * scale).backward()
            found[kind].append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    if rank == 0:
        torch.save({kind: torch.stack(of_steps) for kind, of_steps in found.items()}, folder / "gradients.pt")
    dist.barrier()


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def loss_of(model: torch.nn.Module, images: np.ndarray) -> torch.Tensor:
    """The mean over some images, as a trainer takes it."""
    x = torch.tensor(np.stack([np.sin(images), np.cos(images), IDS[images]], axis=1))
    return ((model(x)[:, 0] - torch.tensor(images % 7)) ** 2).mean()


def names(folder: Path) -> None:
    """Datasets that are another one on the last rank: what is trained of each, or why it is not."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    last, log, rule = rank == world - 1 > 0, Log(folder, rank), KohyaBuckets(64, 32, 128, 32)
    root = folder / f"machine {rank}"  # equal trees in other places
    files = [root / "a" / f"{i}.png" for i in range(6)]
    more = [root / "b" / f"{i}.png" for i in range(6)]
    if last:
        shutil.copytree(root / "a", root / "one renamed")
        (root / "one renamed" / "5.png").rename(root / "one renamed" / "5b.png")

    cases = {
        "same": lambda: BucketedDataset(files + more, rule),
        "reversed": lambda: BucketedDataset(files[::-1] if last else files, rule),
        "exchanged": lambda: BucketedDataset(more + files if last else files + more, rule),
        "renamed": lambda: BucketedDataset.from_folder(root / ("one renamed" if last else "a"), rule, captions=None),
        "store": lambda: BucketedLatentDataset(folder / ("other latents" if last else "latents")),
    }
    for case, make in cases.items():
        dataset, trained, refused = make(), [], ""
        try:
            for batch in BucketBatchSampler(dataset, 2, seed=3):
                trained += ["/".join(Path(dataset[i]["path"]).parts[-2:]) for i in batch]
        except PlanError as error:
            refused = str(error)
        log.write(case=case, trained=trained, refused=refused)


PARTS = {"train": train, "plain": plain, "gradients": gradients, "names": names}


def rank_of(rank: int, ranks: int, store: Path, part: str, folder: Path, *numbers: int) -> None:
    """A rank in a process of its own, without a launcher and without a port: the ranks meet in the file `store`."""
    import torch.distributed as dist

    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)})
    os.environ.update({"LOCAL_WORLD_SIZE": str(ranks), "ACCELERATE_USE_CPU": "true"})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=WAITS))  # fmt: skip
    PARTS[part](folder, *numbers)
    os._exit(0)


if __name__ == "__main__":
    PARTS[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
    # Everything is on disk; torch's gloo threads now and then abort a process that ends in good order.
    os._exit(0)
