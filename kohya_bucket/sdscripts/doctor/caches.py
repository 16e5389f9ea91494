"""Latent caches that are there, and those that --cache_latents_to_disk would still write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.section import Section
from kohya_bucket.adapter.store_folder import store_folder
from kohya_bucket.errors import LatentStoreError, StorageError
from kohya_bucket.extras import pip_install
from kohya_bucket.latents.architectures import ARCHITECTURES, Architecture
from kohya_bucket.latents.fingerprint import Reason, Stale
from kohya_bucket.latents.items import Comparison, EncodeOptions, LatentItems, bits_of, compare
from kohya_bucket.latents.npz.check import why_npz_stale
from kohya_bucket.latents.npz.names import paths_of_run
from kohya_bucket.latents.remote.remote_path import Place
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout, common_root, relative_source
from kohya_bucket.sdscripts.config import Config
from kohya_bucket.sdscripts.doctor.packages import version_of
from kohya_bucket.sdscripts.doctor.room import Lacking, check_room
from kohya_bucket.sdscripts.plan.latents import items_of, wanted_by_config
from kohya_bucket.texts import counted

__all__ = ["cache_section"]

_ENCODING = EncodeOptions("", "float32", "latents", False, False, "auto", "")


def cache_section(read: Config, options: AdapterOptions) -> Section:
    """What is cached and current, what is not, and whether the disk has room for it.

    The model is not in a dataset config: the families are those whose caches are found, or else all.
    """
    section = Section("latent caches")
    paths = [path for dataset in read.datasets for path in dataset.images.paths]
    root = common_root(paths, None)
    parts = [part for part in wanted_by_config(read, _ENCODING, root, options=options) if len(part)]
    in_shards = [f'{name} = "shards"' for name in ("latent_cache", "text_cache") if getattr(options, name) == "shards"]
    if in_shards and not version_of("pyarrow"):
        section.findings.error(
            "no-pyarrow", "", f"{' and '.join(in_shards)} needs pyarrow, which is not installed here",
            pip_install("parquet"),
        )  # fmt: skip
    elif not parts:
        section.facts.append(("images", "none that can have cached latents"))
    elif options.latent_cache == "shards":
        try:
            for folder, mine in _by_store(parts, options).items():
                _shards(section, _distinct(mine), folder)
        except (LatentStoreError, StorageError) as error:
            section.findings.error("store", "", str(error))
    else:
        _npz(section, _distinct(parts), root)
    return section


def _by_store(parts: Sequence[LatentItems], options: AdapterOptions) -> dict[Place, list[LatentItems]]:
    found: dict[Place, list[LatentItems]] = {}
    first_image: dict[int, str] = {}
    for part in parts:
        first = first_image.setdefault(part.dataset, str(part.paths[0]))
        found.setdefault(store_folder(options, first), []).append(part)
    return found


def _distinct(parts: Sequence[LatentItems]) -> list[LatentItems]:
    """Each image at each size once: data sets that share images share their latents."""
    seen: set[tuple[str, int, int]] = set()
    out = []
    for part in parts:
        items = list(items_of(part))
        new = [i for i, item in enumerate(items) if item not in seen]
        seen.update(items)
        if new:
            out.append(part.subset(new))
    return out


def _of_any_family(parts: Sequence[LatentItems]) -> list[Lacking]:
    """The latents of the parts once for each number of values that families have per pixel."""
    families: dict[float, list[str]] = {}
    for arch in sorted(ARCHITECTURES.values(), key=lambda arch: arch.values_per_pixel):
        families.setdefault(arch.values_per_pixel, []).append(arch.title)
    return [Lacking(", ".join(titles), values, list(parts)) for values, titles in families.items()]


def _npz(section: Section, parts: Sequence[LatentItems], root: Path) -> None:
    lacking = []
    for arch in ARCHITECTURES.values():
        found = _files_of(section, parts, arch, root)
        if found is not None:
            lacking.append(Lacking(arch.name, arch.values_per_pixel, found))
    lacking = lacking or _of_any_family(parts)
    check_room(section, lacking, None)


def _files_of(
    section: Section, parts: Sequence[LatentItems], arch: Architecture, root: Path
) -> list[LatentItems] | None:
    """The items of each part whose npz is lacking or stale; None if there is not one file of this family."""
    files = paths_of_run(parts, arch, None, root)
    if not any(path.exists() for paths in files for path in paths):
        return None
    reasons: Counter[str] = Counter()
    unusable: list[str] = []
    lacking = []
    for part, paths in zip(parts, files, strict=True):
        texts = part.interpolations()
        wrong = []
        for i, path in enumerate(paths):
            why = _why(part, i, str(texts[i]), path, arch)
            if why:
                wrong.append(i)
                reasons.update({why[0].brief})
                if why[0].kind is not Stale.MISSING:
                    unusable.append(str(path))
        lacking.append(part.subset(wrong))
    _say(section, arch.name, sum(map(len, parts)), reasons)
    if unusable:
        section.findings.note(
            "stale-caches", "",
            f"{counted(len(unusable), f'{arch.name} cache')} cannot be used as "
            f"{'it is' if len(unusable) == 1 else 'they are'} ({unusable[0]}); sd-scripts alone would "
            "train from some of them or stop",
            "nothing: with kohya_bucket they are made again and named", unusable,
        )  # fmt: skip
    return lacking


def _why(part: LatentItems, i: int, interpolation: str, path: Path, arch: Architecture) -> list[Reason]:
    # no VAE is loaded to compare with
    return why_npz_stale(path, part.entry(i, interpolation), arch, Path(part.paths[i]), ignoring=(Stale.VAE,))


def _shards(section: Section, parts: Sequence[LatentItems], folder: Place) -> None:
    lacking = list(parts)
    if folder.exists() and not folder.is_dir():
        message = f"latent_cache_dir is {str(folder)!r}, which is a file, so no latent can be stored there"
        section.findings.error("store", "", message, "name a folder")
        return
    if Layout(folder).store_file.is_file():
        store = LatentStore(folder)
        reasons: Counter[str] = Counter()
        lacking = []
        for part in parts:
            found = _in_store(store, part)
            reasons.update(found.counts())
            lacking.append(part.subset(np.flatnonzero(found.to_do).tolist()))
        _say(section, str(folder), sum(map(len, parts)), reasons)
    if isinstance(folder, Path):
        check_room(section, _of_any_family(lacking), folder)


def _in_store(store: LatentStore, part: LatentItems) -> Comparison:
    """As training looks: by an image's name there and its bucket, in whatever collection and type of numbers."""
    sources = relative_source(part.paths, store.images_root())
    found = Comparison(np.full(len(part), -1, dtype=np.int64), np.zeros(len(part), dtype=np.uint16))
    elsewhere = bits_of(Stale.BUCKET, Stale.KIND)
    for name in store.collections():
        asked = replace(part, sources=sources, encoding=replace(part.encoding, collection=name))
        seen = compare(store, asked, ignoring=(Stale.VAE, Stale.DTYPE))
        better = (seen.at >= 0) & (seen.differs & elsewhere == 0) & found.to_do
        found.at[better], found.differs[better] = seen.at[better], seen.differs[better]
    return found


def _say(section: Section, name: str, total: int, reasons: Counter[str]) -> None:
    missing = sum(reasons.values())
    text = f"{total - missing:,} of {total:,} latents are there"
    why = ", ".join(f"{reason}: {n:,}" for reason, n in reasons.most_common())
    section.facts.append((name, text + (f"; to encode {why}" if why else "")))
