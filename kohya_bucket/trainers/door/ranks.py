"""What a process of the run is, and how it waits and ends."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.texts import one_line

logger = logging.getLogger("kohya_bucket")


_told: set[str] = set()


def warn_once(line: str) -> None:
    """A warning in the log of the first process, once for all datasets of a run; nothing for an empty text."""
    if line and line not in _told and is_first_process():
        _told.add(line)
        logger.warning("%s", line)


USED = "KOHYA_BUCKET_USED"
"""Environment variable of the processes below a launcher: a folder with a file of each that made its datasets here."""


def note_use() -> None:
    """Tell the launcher above, if there is one, that datasets are made with the adapter."""
    folder = os.environ.get(USED)
    if folder:
        with suppress(OSError):
            Path(folder, str(os.getpid())).touch()


def end_run(line: str) -> NoReturn:
    """One line, which is the exception's text too, and exit code 2."""
    ended = SystemExit(f"kohya_bucket: {one_line(line)}")
    with suppress(OSError):  # the log may be on the disk that is full
        print(ended, file=sys.stderr, flush=True)
    ended.code = 2
    raise ended


@contextmanager
def exit_with_message() -> Iterator[None]:
    """What a user can mend ends the run as `end_run` does, not with a traceback through the trainer.

    From a loader's worker, torch brings it to the trainer's process; of one that exits, it would know nothing.
    """
    try:
        yield
    except KohyaBucketError as error:
        torch_data = sys.modules.get("torch.utils.data")
        if torch_data is not None and torch_data.get_worker_info() is not None:
            raise
        end_run(str(error))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Make many objects that will stay, without Python looking through all of them again and again meanwhile."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


_waits = itertools.count(1)
_STOPPED = "kohya_bucket/caching/stopped"


def wait_for_ranks() -> None:
    """Wait for all processes, for hours if need be: a collective operation would give up after its time-out.

    Raises:
        KohyaBucketError: another process ended within `stop_all_ranks_on_error`.
    """
    store, ranks = _store_and_ranks()
    if store is None:
        return
    key = f"kohya_bucket/caching/{next(_waits)}"
    store.add(key, 1)
    while store.add(key, 0) < ranks:
        if store.add(_STOPPED, 0):
            raise KohyaBucketError(
                "another process of this run ended while it cached, so this one does too: see its log"
            )
        time.sleep(0.1)


@contextmanager
def stop_all_ranks_on_error() -> Iterator[None]:
    """What ends the work of this process ends the waiting of the others, on other machines too."""
    try:
        yield
    except BaseException:
        store, _ = _store_and_ranks()
        if store is not None:
            with suppress(RuntimeError):  # the process that keeps it may be the one that ended
                store.add(_STOPPED, 1)
        raise


def _store_and_ranks() -> tuple[Any, int]:
    """What the processes of a run share, and their number; None where there is one."""
    from torch.distributed import distributed_c10d

    from kohya_bucket.datasets.agreement import world

    ranks = world()[0]
    return (None, 1) if ranks == 1 else (distributed_c10d._get_default_store(), ranks)
