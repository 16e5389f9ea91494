"""Latent caches that are there, and those that --cache_latents_to_disk would still write."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kohya_bucket.buckets.sizes import size_keys
from kohya_bucket.checks import quoted
from kohya_bucket.errors import LatentStoreError, StorageError, UnreadableError
from kohya_bucket.extras import pip_install
from kohya_bucket.latents.fingerprint import Stale
from kohya_bucket.latents.items import Comparison, EncodeOptions, LatentItems, compare
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout, common_root, relative_source
from kohya_bucket.latents.store.storage import StorePath, is_there
from kohya_bucket.texts import counted
from kohya_bucket.trainers.door.environment import version_of
from kohya_bucket.trainers.door.file_findings import Section
from kohya_bucket.trainers.door.options import AdapterOptions, store_folder
from kohya_bucket.trainers.sdscripts.checkout import own_families
from kohya_bucket.trainers.sdscripts.config import Config
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES, Family
from kohya_bucket.trainers.sdscripts.npz.check import npz_entry
from kohya_bucket.trainers.sdscripts.npz.names import paths_of_run, why_too_long
from kohya_bucket.trainers.sdscripts.wanted_latents import items_of, wanted_by_config

_NOT_LOADED = (Stale.VAE,)  # no VAE is, to compare with
_ENCODING = EncodeOptions("", "float32", "latents", False, False, "auto", "")


def cache_section(read: Config, checkout: Path | None) -> Section:
    """What is cached and current, what is not, and whether the disk has room for it.

    The model is not in a dataset config: the families are those whose caches are found, or else all. Those that only
    the checkout has are among them.
    """
    section, options = Section("latent caches"), read.options or AdapterOptions()
    paths = [path for dataset in read.datasets for path in dataset.images.paths]
    root = common_root(paths, None)
    parts = [part for part in wanted_by_config(read, _ENCODING, root, options=options) if len(part)]
    if options.latent_cache == "shards" and not version_of("pyarrow"):
        section.findings.error(
            "no-pyarrow", "", 'latent_cache = "shards" needs pyarrow, which is not installed here',
            pip_install("parquet"),
        )  # fmt: skip
    elif not parts:
        section.facts.append(("images", "none that can have cached latents"))
    elif options.latent_cache == "shards":
        first_image: dict[int, str] = {}
        stores: dict[StorePath, list[LatentItems]] = {}
        for part in parts:
            first = first_image.setdefault(part.dataset, str(part.paths[0]))
            stores.setdefault(store_folder(options, first), []).append(part)
        try:
            for folder, parts_in_store in stores.items():
                _shards(section, _distinct(parts_in_store), folder)
        except (LatentStoreError, StorageError, UnreadableError) as error:
            section.findings.error("store", "", str(error))
    else:
        try:
            _npz(section, _distinct(parts), root, own_families(checkout) if checkout else [])
        except UnreadableError as error:
            section.findings.error("npz", "", str(error))
    return section


def _distinct(parts: Sequence[LatentItems]) -> list[LatentItems]:
    """Each image at each size once: datasets that share images share their latents."""
    seen: set[tuple[str, int, int]] = set()
    out = []
    for part in parts:
        items = list(items_of(part))
        new = [i for i, item in enumerate(items) if item not in seen]
        seen.update(items)
        if new:
            out.append(part.subset(new))
    return out


def _npz(section: Section, parts: Sequence[LatentItems], root: Path, own: Sequence[Family]) -> None:
    """Of each family that has npz there: how many a run would make again, and why; and the room that those need."""
    needed: list[int] = []
    lacking: list[LatentItems] = []
    too_long: dict[str, str] = {}  # images and why, of the family with the most
    for arch in (*ARCHITECTURES.values(), *own):
        files = paths_of_run(parts, arch, None, root)
        too_long_here = {
            part.paths[i]: unnameable for part, paths in zip(parts, files, strict=True) for i, path in enumerate(paths)
            if (unnameable := why_too_long(path))
        }  # fmt: skip
        if len(too_long_here) > len(too_long):
            too_long = too_long_here
        if not any(map(os.path.exists, (path for paths in files for path in paths))):
            continue
        reasons: Counter[str] = Counter()
        wrong: list[LatentItems] = []
        for part, paths in zip(parts, files, strict=True):
            reasons_of = [
                npz_entry(path, part.entry(i), arch, Path(part.paths[i]), ignoring=_NOT_LOADED).reasons
                for i, path in enumerate(paths)
            ]
            reasons.update(why[0].brief for why in reasons_of if why)
            wrong.append(part.subset([i for i, why in enumerate(reasons_of) if why]))
        _say(section, arch.name, sum(map(len, parts)), reasons)
        if not arch.channels:
            message = f"latents that end in {arch.suffix} are of a family that only the checkout has. Not known: how "
            section.findings.note("own-family", "", message + "many channels they have, and the room that they need")
            continue
        lacking += wrong
        needed.append(sum(nbytes_of(part, arch.values_per_pixel, npz=True) for part in wrong))
    if too_long:
        first = next(iter(too_long.values()))
        message = f"{counted(len(too_long), 'image', 'has', 'have')} a name that is too long to be cached: {first}"
        section.findings.warning("long-names", "", message, 'or set latent_cache = "shards"', too_long)
    # Without a family's npz, all are to be made, of whichever family.
    lacking = lacking if needed else list(parts)
    folders = {Path(path).parent for part in lacking for path in part.paths}
    elsewhere = 'latent_cache = "shards" with another latent_cache_dir'
    _say_room(section, needed or _of_any_family(parts, npz=True), folders, elsewhere)


def _shards(section: Section, parts: Sequence[LatentItems], folder: StorePath) -> None:
    lacking = list(parts)
    if folder.is_file():
        message = f"latent_cache_dir is {quoted(folder)}, which is a file, so no latent can be stored there"
        section.findings.error("store", "", message, "name a folder")
        return
    if is_there(Layout(folder).store_file):
        store = LatentStore(folder)
        reasons: Counter[str] = Counter()
        lacking = []
        for part in parts:
            comparison = _in_store(store, part)
            reasons.update(comparison.counts())
            lacking.append(part.subset(np.flatnonzero(comparison.to_do).tolist()))
        _say(section, str(folder), sum(map(len, parts)), reasons)
    if isinstance(folder, Path):
        _say_room(section, _of_any_family(lacking, npz=False), [folder], "another latent_cache_dir")


def _in_store(store: LatentStore, part: LatentItems) -> Comparison:
    """As training looks: by an image's name there and its bucket, in whatever collection and type of numbers."""
    sources = relative_source(part.paths, store.layout.images_root())
    best = Comparison(np.full(len(part), -1, dtype=np.int64), {})
    for name in store.collections():
        asked = replace(part, sources=sources, encoding=replace(part.encoding, collection=name))
        seen = compare(store, asked, ignoring=(Stale.VAE, Stale.DTYPE))
        better = (seen.at >= 0) & ~seen.differs[Stale.BUCKET] & ~seen.differs[Stale.KIND] & best.to_do
        best.at[better] = seen.at[better]
        for kind, differs in seen.differs.items():
            best.differs.setdefault(kind, np.zeros(len(part), dtype=np.bool_))[better] = differs[better]
    return best


def _say(section: Section, name: str, total: int, reasons: Counter[str]) -> None:
    missing = sum(reasons.values())
    text = f"{total - missing:,} of {total:,} latents are there"
    why = ", ".join(f"{reason}: {n:,}" for reason, n in reasons.most_common())
    section.facts.append((name, text + (f"; to encode {why}" if why else "")))


_VALUE_BYTES = 4  # float32, as sd-scripts keeps them
_NPZ_BYTES = 1500  # names, headers and the small arrays of one npz
_ITEM_BYTES, _SHARD_BYTES = 400, 12_000  # of one item in a store, and of one of its files


def _say_room(section: Section, needed: Sequence[int], folders: Iterable[Path], elsewhere: str) -> None:
    """One line: bytes to write, which depend on the model's family, and what is free on the disks of `folders`."""
    least, most = min(needed), max(needed)
    if not most:
        return
    text = f"{human(most)} to write" if least == most else f"{human(least)} to {human(most)} to write (by model family)"
    nearest = [_existing(folder) for folder in folders]
    try:
        free = sum({folder.stat().st_dev: shutil.disk_usage(folder).free for folder in nearest}.values())
    except OSError as error:
        section.facts.append(("room", f"{text}; what is free is unknown: {error}"))
        return
    text += f", {human(free)} free"
    section.facts.append(("room", text))
    if most > free:
        report = section.findings.error if least > free else section.findings.warning
        report("disk-full", "", f"latents need more room than there is: {text}", f"free some space, or set {elsewhere}")


def _of_any_family(parts: Sequence[LatentItems], *, npz: bool) -> list[int]:
    """Bytes of the latents for each number of values that families have per pixel."""
    families = {arch.values_per_pixel for arch in ARCHITECTURES.values()}
    return [sum(nbytes_of(part, values, npz=npz) for part in parts) for values in families]


def nbytes_of(part: LatentItems, values_per_pixel: float, *, npz: bool) -> int:
    """Bytes of all items of a part, with flips and masks where they are asked for."""
    pixels = part.bucket_sizes.astype(np.int64).prod(axis=1)
    latents = (pixels * values_per_pixel).astype(np.int64) * _VALUE_BYTES * (2 if part.encoding.flip else 1)
    masks = pixels * (_VALUE_BYTES if npz else 1) if part.encoding.mask else 0
    if npz:
        return int((latents + masks + _NPZ_BYTES).sum())
    return int((latents + masks + _ITEM_BYTES).sum()) + _SHARD_BYTES * len(np.unique(size_keys(part.bucket_sizes)))


def human(nbytes: int) -> str:
    """2_500_000 -> "2.5 MB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    return nearest
