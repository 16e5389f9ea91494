"""The loader over a data set group, and the collator that tells the epoch."""

from __future__ import annotations

from kohya_bucket.adapter.seams import Owners, Seam, Subject
from kohya_bucket.adapter.shapes import Takes, TakesAmong, Uses

__all__ = ["LOADING"]

_ARGUMENTS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn")


def _seams(owners: Owners) -> tuple[Seam, ...]:
    return (
        Seam("collator_class.__init__", (Takes("epoch", "step", "dataset"),)),
        Seam(
            "collator_class.__call__",
            (Takes("examples"), Uses("current_epoch", "current_step", "set_current_epoch", "set_current_step")),
        ),
        Seam("DataLoader.__init__", (TakesAmong(*_ARGUMENTS, "num_workers", "worker_init_fn", "generator"),)),
    )


LOADING = Subject("loading", "the loader of a data set group", _seams, orders_epochs=True)
