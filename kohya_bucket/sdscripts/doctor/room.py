"""Whether disks have room for the latents that are still to be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kohya_bucket.adapter.section import Section
from kohya_bucket.buckets.sizes import size_keys
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.texts import counted

__all__ = ["Lacking", "check_room", "nbytes_of"]

_VALUE_BYTES = 4  # float32, as sd-scripts keeps them
_NPZ_BYTES = 1500  # names, headers and the small arrays of one npz
_ITEM_BYTES, _SHARD_BYTES = 400, 12_000  # of one item in a store, and of one of its files


@dataclass(frozen=True)
class Lacking:
    """Latents to be written: of which model families, and how many values they have per pixel of the bucket."""

    families: str
    values_per_pixel: float
    parts: Sequence[LatentItems]


def check_room(section: Section, lacking: Sequence[Lacking], store: Path | None) -> None:
    """Compare what is to be written with what is free, disk by disk.

    Args:
        lacking: alternatives, the smallest latents first.
        store: folder of a latent store; None for npz beside the images.
    """
    fits = 0
    for one in lacking:
        needed = _needed(one, store)
        full = []
        for folder, nbytes in needed.items():
            free = free_bytes(folder)
            text = f"{one.families}: {human(nbytes)} to write in {folder}"
            section.facts.append(("room", text + ("" if free is None else f", {human(free)} free")))
            if free is not None and nbytes > free:
                full.append(f"{folder} has {human(free)} free, but latents of {one.families} need {human(nbytes)}")
        if not full:
            fits += 1
            continue
        report = section.findings.warning if fits else section.findings.error
        elsewhere = "another latent_cache_dir" if store else 'latent_cache = "shards" with another latent_cache_dir'
        report("disk-full", "", "; ".join(full), f"free some space, or set {elsewhere}")
    beside = {Path(path).parent for one in lacking for part in one.parts for path in part.paths}
    folders = [store] if store else sorted(beside)
    locked = [str(folder) for folder in folders if not _may_write(_existing(folder))]
    if locked:
        section.findings.warning(
            "not-writable", "",
            f"{counted(len(locked), 'folder')} cannot be written to, so no latent is cached there ({locked[0]})",
            "change their permissions, or set another latent_cache_dir", locked,
        )  # fmt: skip


def nbytes_of(part: LatentItems, values_per_pixel: float, *, npz: bool) -> int:
    """Bytes of all items of a part, with flips and masks where they are asked for."""
    pixels = part.bucket_sizes.astype(np.int64).prod(axis=1)
    latents = (pixels * values_per_pixel).astype(np.int64) * _VALUE_BYTES * (2 if part.encoding.flip else 1)
    masks = pixels * (_VALUE_BYTES if npz else 1) if part.encoding.mask else 0
    if npz:
        return int((latents + masks + _NPZ_BYTES).sum())
    return int((latents + masks + _ITEM_BYTES).sum()) + _SHARD_BYTES * len(np.unique(size_keys(part.bucket_sizes)))


def free_bytes(folder: Path) -> int | None:
    """Bytes free where `folder` is or will be; None if nobody can tell."""
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return None


def human(nbytes: int) -> str:
    """2_500_000 -> "2.5 MB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


def _needed(one: Lacking, store: Path | None) -> dict[Path, int]:
    """Bytes by the first folder met on each disk."""
    if store is not None:
        total = sum(nbytes_of(part, one.values_per_pixel, npz=False) for part in one.parts)
        return {store: total} if total else {}
    first_on: dict[int, Path] = {}
    needed: dict[Path, int] = {}
    for part in one.parts:
        by_folder: dict[Path, list[int]] = {}
        for i, path in enumerate(part.paths):
            by_folder.setdefault(Path(path).parent, []).append(i)
        for folder, items in by_folder.items():
            place = first_on.setdefault(_existing(folder).stat().st_dev, folder)
            needed[place] = needed.get(place, 0) + nbytes_of(part.subset(items), one.values_per_pixel, npz=True)
    return needed


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there


def _may_write(folder: Path) -> bool:
    """Windows answers for a file attribute that says nothing of folders: there it counts as yes."""
    return os.name == "nt" or os.access(folder, os.W_OK)
