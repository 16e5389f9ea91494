"""A loader of planned batches as accelerate prepares it for any rank, in one process."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from kohya_bucket import prepare_loader

IDS = np.random.RandomState(3).choice(5, 103, p=[0.5, 0.3, 0.1, 0.07, 0.03])


def accelerator_of(ranks: int = 1, rank: int = 0, **options: Any) -> SimpleNamespace:
    """What `prepare_loader` needs of an accelerator: here one that prepares for any rank."""

    def prepare_data_loader(loader: DataLoader) -> DataLoader:
        from accelerate import Accelerator, data_loader

        Accelerator()  # accelerate 0.30 wants one before
        return data_loader.prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options)

    return SimpleNamespace(num_processes=ranks, prepare_data_loader=prepare_data_loader)


def prepared(sampler: Any, ranks: int = 1, rank: int = 0, workers: int = 0, **options: Any) -> DataLoader:
    plain = DataLoader(list(range(len(IDS))), batch_sampler=sampler, num_workers=workers)
    return prepare_loader(accelerator_of(ranks, rank, **options), plain)


def lists(loader: DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]
