"""One copy of a data set for all ranks of a node: its columns lie in a file that every rank maps."""

from __future__ import annotations

import atexit
import contextlib
import gc
import mmap
import os
import pickle
import platform
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from kohya_bucket.datasets.agreement import gather, time_out, world
from kohya_bucket.errors import KohyaBucketError, why_not_written
from kohya_bucket.files import write_file
from kohya_bucket.inputs import open_input

Made = TypeVar("Made")
_ALIGNED = 4096


_Written = tuple[str, list[tuple[int, int]]]
"""A file with a pickled object: where its arrays lie, and last the rest of it; (offset, length) each."""


def shared_on_node(make: Callable[[], Made], folder: str | os.PathLike[str] | None = None) -> Made:
    """What `make()` gives, made by one rank of each node, with its arrays in memory once for all ranks of the node.

    Every rank of the default process group must call this, with a `make` that gives the same on each. The arrays (of
    numpy, Arrow and torch's CPU tensors) go into a temporary file of the node, which each rank maps; a rank that writes
    into one of them changes its own copy of those pages. The file is removed as soon as all have mapped it; on
    Windows, which removes no file that is mapped, when the program ends. In a single process it is `make()`.

    Args:
        make: such as `lambda: BucketedLatentDataset("latents")`; what it gives must be picklable, as a data set is that
            worker processes are given.
        folder: for the file; by default the system's for temporary files.

    Raises:
        KohyaBucketError: the rank that makes it failed, or has no room for the file; on every rank.
    """
    if world()[0] == 1:
        return make()
    group = dist.new_group(backend="gloo", timeout=time_out())
    try:
        return _shared(make, folder, group)
    finally:
        dist.destroy_process_group(group)  # one that is alive when Python exits can abort the process


def _shared(make: Callable[[], Made], folder: str | os.PathLike[str] | None, group: Any) -> Made:
    node = {"node": (platform.node(), uuid.getnode())}
    leader = [other["node"] for other in gather(node, group)].index(node["node"])
    told: dict[str, Any] = {"written": None, "failed": ""}
    failure: BaseException | None = None
    if dist.get_rank() == leader:
        try:
            told["written"] = _write(make(), folder)
            gc.collect()
        except Exception as error:
            failure, told["failed"] = error, f"{type(error).__name__}: {error}"
    everyone = gather(told, group)
    mine: _Written | None = everyone[leader]["written"]
    found: list[Made] | None = None
    try:
        if mine is not None:
            with contextlib.suppress(OSError):  # a container of its own, on a machine of the same name
                found = [_attached(mine)]
    finally:  # or a rank that cannot read it leaves the others waiting, and the file
        gather({}, group)
        if told["written"] is not None:
            _remove(told["written"][0])
    if failure is not None:
        raise failure
    for rank, other in enumerate(everyone):
        if other["failed"]:
            raise KohyaBucketError(f"rank {rank} could not make what ranks share: {other['failed']}")
    return make() if found is None else found[0]


def _write(made: Any, folder: str | os.PathLike[str] | None) -> _Written:
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(made, protocol=5, buffer_callback=buffers.append)
    parts, places = [], []
    end = 0
    for part in (*(buffer.raw() for buffer in buffers), memoryview(rest)):
        places.append((end + -end % _ALIGNED, part.nbytes))
        parts += [bytes(-end % _ALIGNED), part]
        end = sum(places[-1])
    own = None
    try:
        own = Path(tempfile.mkdtemp(prefix="kohya_bucket_", dir=folder))  # where no other user can read or write
        write_file(own / "columns", parts, sync=False)
    except (OSError, KohyaBucketError) as error:
        if own is not None:
            own.rmdir()
        where = folder or tempfile.gettempdir()
        why = why_not_written(error) if isinstance(error, OSError) else error
        raise KohyaBucketError(f"{where}: what ranks share cannot be written there: {why}") from error
    return str(own / "columns"), places


def _attached(written: _Written) -> Any:
    path, places = written
    with open_input(path) as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    *arrays, rest = (view[at : at + n] for at, n in places)
    return pickle.loads(rest, buffers=arrays)


def _remove(path: str) -> None:
    try:
        Path(path).unlink()
        Path(path).parent.rmdir()
    except OSError:  # Windows: it is mapped
        atexit.register(shutil.rmtree, Path(path).parent, ignore_errors=True)
