"""Ranks make sure that they are about to train the same plan, before one waits for another for ever."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from kohya_bucket._version import __version__
from kohya_bucket.checks import integer, whole
from kohya_bucket.errors import PlanError
from kohya_bucket.planning import EpochPlan
from kohya_bucket.planning.fingerprint import agree


def world() -> tuple[int, int]:
    """(number of ranks, this rank), as torch.distributed knows them; (1, 0) without it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def given_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int] | None:
    """(number of ranks, this rank) as a user gave them, or None: `world()` when they are needed.

    Raises:
        PlanError: one without the other, or a rank that is not below the number.
    """
    if num_replicas is None and rank is None:
        return None
    if num_replicas is None or rank is None:
        raise PlanError("num_replicas and rank belong together: give both, or neither")
    replicas, number = whole("num_replicas", num_replicas, 1), integer("rank", rank)
    if not 0 <= number < replicas:
        raise PlanError(f"rank is {rank}, but with num_replicas={num_replicas} must be 0 to {replicas - 1}")
    return replicas, number


def time_out() -> timedelta:
    """How long the run's own process group waits for a rank, as `init_process_group` was told."""
    try:
        devices = dist.group.WORLD._device_types
        options = dist.group.WORLD._get_backend(devices[0]).options
        return timedelta(seconds=options._timeout.total_seconds())
    except (AttributeError, IndexError, RuntimeError):  # torch has no public name for it
        return timedelta(seconds=default_pg_timeout.total_seconds())


def gather(mine: Mapping[str, Any], group: Any = None) -> list[Mapping[str, Any]]:
    """What every rank of a process group gives, by rank; the default group is all ranks of a run."""
    everyone: list[Any] = [None] * world()[0]
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def agree_on(plan: EpochPlan) -> None:
    """Compare this rank's plan with those of all other ranks; returns at once in a single process.

    Every rank of the default process group must call this. Works on a gloo group of its own, so it needs no GPU,
    and a rank that does not come is noticed after the time-out of the run's process group: another rank may be saving
    or drawing samples meanwhile.

    Raises:
        RanksDifferError: the plans differ, with the difference, on every rank.
        PlanError: a rank did not come.
    """
    if world()[0] == 1:
        return

    def gather_soon(mine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        group, patience = None, time_out()
        try:
            # Not kept for the next epoch: a gloo group that is still alive when Python exits can abort the process.
            group = dist.new_group(backend="gloo", timeout=patience)
            return gather(mine, group)
        except RuntimeError as error:
            raise PlanError(
                f"epoch {plan.epoch}: not all ranks came to compare their plans within "
                f"{patience.total_seconds():g} s, the time-out of the process group; see the other "
                f"ranks' logs for what stopped them ({error})"
            ) from error
        finally:
            if group is not None:
                dist.destroy_process_group(group)

    compared = {  # the hash, and what names the difference if the hashes differ
        **plan.fingerprint, "world_size": plan.world_size, "first step": plan.first_step, "steps": plan.steps,
        "kohya_bucket": __version__, "numpy": np.__version__, "hash": plan.hash,
    }  # fmt: skip
    remedy = "Give all ranks the same data, settings, seed and epoch"
    agree(compared, gather_soon, "is about to train another plan", remedy, deciding="hash")
