"""npz as what `precompute_latents` writes: a file for each image, beside it or in the same folders elsewhere."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, LatentStoreError, UnreadableError
from kohya_bucket.files import GroupedSync, make_folder, remove_leftovers
from kohya_bucket.images.remote import is_url
from kohya_bucket.latents.encode.precompute import Refused
from kohya_bucket.latents.encode.worker import EncodedBatch
from kohya_bucket.latents.fingerprint import Stale, StaleReason
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.vae.encoder import VAEEncoder
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES, Family
from kohya_bucket.trainers.sdscripts.npz.check import ensure_current
from kohya_bucket.trainers.sdscripts.npz.names import has_whole_name, paths_of_run, why_too_long
from kohya_bucket.trainers.sdscripts.npz.read_write import (
    NpzLatents,
    convert_values,
    mask_values,
    refuse_foreign,
    write_npz,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NpzFiles:
    """An output of `precompute_latents`: sd-scripts' own files.

    Attributes:
        architecture: the model family, one of `ARCHITECTURES`; "": as the encoder says.
        folder: the same folders as those of the images are made in it; None: beside the images.
        sd_scripts: the version that will read them, e.g. "0.10.1"; "" for the newest.
    """

    architecture: str = ""
    folder: str | os.PathLike[str] | None = None
    sd_scripts: str = ""

    def accept(self, wanted: LatentItems, encoder: VAEEncoder, images_root: Path) -> tuple[LatentItems, Refused]:
        """See `LatentOutput`. Raises as `with_files`."""
        return (wanted if wanted.files else self.with_files([wanted], encoder, images_root)[0]), []

    def with_files(self, parts: Sequence[LatentItems], encoder: VAEEncoder, images_root: Path) -> list[LatentItems]:
        """The parts of a run with the file of each item. Whatever the VAE computes in, these hold float32.

        Raises:
            KohyaBucketError: a distribution is wanted, or a VAE that is of no model family or of another; a version
                that reads other files; `folder` is in object storage, or an image where no npz can lie beside it.
        """
        for part in parts:
            check_npz(part.encoding.kind, self.folder)
        name = self.architecture or str(getattr(encoder, "architecture", ""))
        check_family(encoder, name)
        root = None if self.folder is None else Path(self.folder)
        files = paths_of_run(parts, self._family(name), root, images_root)
        return [
            replace(part, encoding=replace(part.encoding, dtype="float32"), files=its)
            for part, its in zip(parts, files, strict=True)
        ]

    def sink(self, share: LatentItems, space: LatentSpace, images_root: Path) -> NpzSink:
        """See `LatentOutput`."""
        return NpzSink(share, space, self._family(self.architecture or space.architecture))

    def _family(self, name: str) -> Family:
        return ARCHITECTURES[name].read_by(self.sd_scripts)


def check_npz(kind: str, folder: str | os.PathLike[str] | None) -> None:
    """Refuse what cannot be written whatever the encoder: npz in object storage, or a distribution."""
    if is_url(os.fspath(folder or "")):
        raise KohyaBucketError(
            f"{folder}: npz files are read from folders, not from object storage: use --format shards"
        )
    if kind == "posterior":
        raise KohyaBucketError(
            "sd-scripts' npz files hold latents, not a distribution: use --format shards with --posterior"
        )


def check_family(encoder: VAEEncoder, name: str) -> None:
    """Refuse an unknown model family, or a VAE whose latents have another shape than the family's."""
    if name not in ARCHITECTURES:
        raise KohyaBucketError(
            f"npz files are named by model family, and {name or 'none'!r} is not one: "
            f"add --arch, one of {', '.join(ARCHITECTURES)}"
        )
    arch = ARCHITECTURES[name]
    if (encoder.latent_channels, encoder.downsample_factor) != (arch.channels, arch.stride):
        raise KohyaBucketError(
            f"the VAE has {encoder.latent_channels} channels and divides by {encoder.downsample_factor}; "
            f"{arch.name} has {arch.channels} and divides by {arch.stride}"
        )


class NpzSink:
    """Writes the file of each item, which has its own: see `NpzFiles`.

    Each file is there whole or not at all, also where the process is killed. Groups of them are waited for together. A
    power failure before may leave a file that is cut off, and that the next run and sd-scripts find broken: an npz has
    its directory at the end.
    """

    def __init__(self, wanted: LatentItems, space: LatentSpace, arch: Family) -> None:
        self._wanted, self._space, self._arch = wanted, space, arch
        self.paths, self.refused = list(wanted.files or ()), dict[int, str]()
        self.notes = [
            f"{image}: another image of its folder has the same name and size, and sd-scripts would "
            f"let both use one file; its own is {path.name}, which sd-scripts finds with the "
            "kohya_bucket adapter only: rename the image to do without"
            for image, path in zip(wanted.paths, self.paths, strict=True)
            if has_whole_name(path, image)
        ]
        remove_leftovers(self.paths)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="kohya-bucket-npz")
        self._groups = GroupedSync(self._pool)

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        reasons_of: list[list[StaleReason]] = [[] for _ in self.paths]
        for i, (path, image) in enumerate(zip(self.paths, map(Path, self._wanted.paths), strict=True)):
            if why := why_too_long(path):
                self.refused[i] = why
                continue
            try:
                reasons = ensure_current(path, self._wanted.entry(i), self._arch, image)[0]
                if any(reason.kind is Stale.BROKEN for reason in reasons):
                    refuse_foreign(path)
                reasons_of[i] = reasons
            except (LatentStoreError, UnreadableError) as error:
                self.refused[i] = str(error)
        counts = Counter(str(reason) for reasons in reasons_of for reason in reasons)
        return np.array([bool(reasons) for reasons in reasons_of], dtype=bool), dict(counts)

    def write(self, batch: EncodedBatch) -> None:
        plain = self._values(batch.plain)
        flipped = [None] * len(plain) if batch.flipped is None else self._values(batch.flipped)
        for path in self._pool.map(self._write_one, batch.items, plain, flipped, batch.masks):
            self._groups.add(path)

    def flush(self) -> None:
        self._groups.finish()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def finish(self, wanted: LatentItems) -> None:
        pass  # each file stands for itself

    def _write_one(
        self, i: int, plain: npt.NDArray[np.float32], flipped: npt.NDArray[np.float32] | None,
        mask: npt.NDArray[np.uint8] | None,
    ) -> Path:  # fmt: skip
        entry, path = self._wanted.entry(i), self.paths[i]
        bucket = entry.fingerprint.bucket_size
        alpha = mask_values(mask, bucket) if entry.fingerprint.mask else None
        make_folder(path.parent)
        item = NpzLatents(plain, entry.original_size, entry.crop_ltrb, flipped, alpha)
        name = os.path.basename(self._wanted.paths[i])
        write_npz(path, item, bucket, self._arch, entry.fingerprint, source_name=name, sync=False)
        return path

    def _values(self, latents: torch.Tensor) -> npt.NDArray[np.float32]:
        return convert_values(latents.numpy(), self._space, self._arch)
