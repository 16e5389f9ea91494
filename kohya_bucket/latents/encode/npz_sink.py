"""Encoded batches into sd-scripts' npz."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kohya_bucket.files import GroupedSync, make_folder, remove_leftovers
from kohya_bucket.latents.architectures import Architecture
from kohya_bucket.latents.encode.sinks import EncodedBatch, OnDone
from kohya_bucket.latents.fingerprint import Reason
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.latent_space import LatentSpace
from kohya_bucket.latents.npz.check import settle_npz
from kohya_bucket.latents.npz.names import has_whole_name, paths_of_run
from kohya_bucket.latents.npz.read_write import NpzLatents, convert_values, mask_values, write_npz

if TYPE_CHECKING:
    import torch

__all__ = ["NpzSink"]

_GROUP = 64


class NpzSink:
    """Writes sd-scripts' files: beside the images, or in the same folders under `root`.

    Each file is there whole or not at all, also where the process is killed. Items are said to be done when their files
    are on disk; for that, groups of them are waited for together. A power failure before may leave a file that is cut
    off, which is no npz: its directory is at the end. The next run, and sd-scripts, notice.

    `paths` names them where the items are part of a run, see `paths_of_run`.
    """

    def __init__(
        self, root: Path | None, wanted: LatentItems, space: LatentSpace, arch: Architecture, images_root: Path,
        on_done: OnDone, *, paths: Sequence[Path] | None = None, threads: int = 4, sync: bool = True,
    ) -> None:  # fmt: skip
        self._wanted = wanted
        self._arch = arch
        self._space = space
        self._texts = wanted.interpolations()
        self._on_done = on_done
        self._sync = sync
        self.paths = paths_of_run([wanted], arch, root, images_root)[0] if paths is None else list(paths)
        self.work = (root or images_root) / ".kohya_bucket_work"
        self.notes = [
            f"{image}: another image of its folder has the same name and size, and sd-scripts would "
            f"let both use one file; its own is {path.name}, which sd-scripts finds with the "
            "kohya_bucket adapter only: rename the image to do without"
            for image, path in zip(wanted.paths, self.paths, strict=True)
            if has_whole_name(path, image)
        ]
        remove_leftovers(self.paths)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kohya-bucket-npz")
        self._pending: list[Future[int]] = []
        self._groups = GroupedSync(self._pool, on_done, _GROUP)

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        reasons = [[str(reason) for reason in self.reasons(i)] for i in range(len(self._wanted))]
        counts = Counter(text for texts in reasons for text in texts)
        return np.array([bool(texts) for texts in reasons], dtype=bool), dict(counts)

    def to_do(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        keep = [i for i in items.tolist() if self.reasons(i)]
        return np.array(keep, dtype=np.int64)

    def reasons(self, i: int) -> list[Reason]:
        """Why item `i` must be encoded; none if it is current. Then its file is as the reader asks for it, too."""
        entry = self._wanted.entry(i, self._texts[i])
        return settle_npz(self.paths[i], entry, self._arch, Path(self._wanted.paths[i]))[0]

    def write(self, batch: EncodedBatch) -> None:
        plain = self._values(batch.plain)
        flipped = None if batch.flipped is None else self._values(batch.flipped)
        for k, i in enumerate(batch.items):
            mask = batch.masks[k]
            self._pending.append(
                self._pool.submit(self._write_one, i, plain[k], None if flipped is None else flipped[k], mask)
            )
        while self._pending and (self._pending[0].done() or len(self._pending) > _GROUP):
            self._written(self._pending.pop(0).result())

    def flush(self) -> None:
        while self._pending:
            self._written(self._pending.pop(0).result())
        self._groups.finish()

    def _written(self, i: int) -> None:
        if self._sync:
            self._groups.add(self.paths[i], i)
        else:
            self._on_done([i])

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def finish(self) -> None:
        pass  # each file stands for itself

    def _write_one(
        self, i: int, plain: npt.NDArray[np.float32], flipped: npt.NDArray[np.float32] | None,
        mask: npt.NDArray[np.uint8] | None,
    ) -> int:  # fmt: skip
        entry = self._wanted.entry(i, self._texts[i])
        bucket = entry.fingerprint.bucket_size
        alpha = mask_values(mask, bucket) if entry.fingerprint.mask else None
        make_folder(self.paths[i].parent)
        item = NpzLatents(plain, entry.original_size, entry.crop_ltrb, flipped, alpha)
        name = os.path.basename(self._wanted.paths[i])
        write_npz(self.paths[i], item, bucket, self._arch, entry.fingerprint, source_name=name, sync=False)
        return i

    def _values(self, latents: torch.Tensor) -> npt.NDArray[np.float32]:
        return convert_values(latents.numpy(), self._space, self._arch)
