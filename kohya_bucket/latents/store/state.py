"""What is in a store and what is wrong with it, damage and changed image files too. Nothing here writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.files import final_name
from kohya_bucket.images.origins import Origins
from kohya_bucket.latents.fingerprint import source_changes
from kohya_bucket.latents.store.contents import manifest_of, self_described
from kohya_bucket.latents.store.entries import arrow
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import paths_of


def check_sources(
    store: LatentStore, paths: list[str], *, content: bool = False
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """[N] whether the file behind each item is absent, and whether it has changed; `paths` has one path per item.

    With `content`, files whose hash is stored are read in full, so that an edit that kept length and time shows.
    """
    images = Origins.named(paths)
    nbytes, mtimes = images.stamps()
    absent = nbytes < 0
    rows = np.flatnonzero(~absent)
    changed = np.zeros(len(store), dtype=bool)
    now = {"source_bytes": nbytes[rows], "source_mtime_ns": mtimes[rows]}
    found = source_changes(
        store.source_columns(rows), now, lambda k: images.hash(int(rows[k])), inside=images.inside[rows],
        always=content,
    )  # fmt: skip
    changed[rows] = found > 0
    return absent, changed


@dataclass
class StoreStatus:
    """State of a store.

    Attributes:
        items: items that can be read.
        nbytes, shards: size of the shards on disk and their number.
        groups: number of items by (collection, bucket, dtype, kind, vae).
        superseded: rows on disk that newer ones have replaced.
        unindexed: shards that the manifest does not name yet.
        damage: (file, what is wrong).
        changed, absent: sources of items whose image is another by now, or not there.
        no_images: not one source is there, so the store was carried away from its images: nothing is stale.
        temporary: leftover files.
        of_images: it holds latents of images, not outputs of text encoders.
    """

    items: int
    nbytes: int
    shards: int
    groups: dict[tuple[str, tuple[int, int], str, str, str], int]
    superseded: int
    unindexed: int
    damage: list[tuple[str, str]]
    changed: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    no_images: bool = False
    temporary: list[str] = field(default_factory=list)
    of_images: bool = True

    @property
    def healthy(self) -> bool:
        """Everything can be trained as it is."""
        return not (self.damage or self.changed or (self.absent and not self.no_images))


def source_paths(store: LatentStore, images_root: Path | None = None) -> list[str]:
    """Path of the image behind each item."""
    return paths_of(store.strings("source"), store.layout.images_root() if images_root is None else images_root)


def status(store: LatentStore, *, images_root: Path | None = None, content: bool = False) -> StoreStatus:
    """Look at a store, and at the image files behind it (length and time; with `content` also their hashes)."""
    paths = source_paths(store, images_root)
    none = np.zeros(len(store), dtype=bool)
    absent, changed = check_sources(store, paths, content=content) if store.of_images else (none, none)
    names = ["collection", "dtype", "kind", "vae", "bucket_width", "bucket_height"]
    groups: dict[tuple[str, tuple[int, int], str, str, str], int] = {}
    for row in store.table.group_by(names, use_threads=False).aggregate([([], "count_all")]).to_pylist():
        key = (row["collection"], (row["bucket_width"], row["bucket_height"]), row["dtype"], row["kind"], row["vae"])
        groups[key] = row["count_all"]
    layout = store.layout
    return StoreStatus(
        items=len(store),
        nbytes=sum(layout.shard_sizes().values()),
        shards=len(store.shards),
        groups=groups,
        superseded=store.replaced_rows(),
        unindexed=len(store.unindexed),
        damage=list(store.damage),
        changed=[paths[i] for i in np.flatnonzero(changed).tolist()],
        absent=[paths[i] for i in np.flatnonzero(absent).tolist()],
        no_images=bool(len(store)) and bool(absent.all()),
        temporary=temporary_files(store),
        of_images=store.of_images,
    )


def temporary_files(store: LatentStore) -> list[str]:
    """What interrupted writers left behind, and what running ones are writing. In object storage nothing is."""
    folders = [folder for folder in (store.layout.root, store.layout.shards) if isinstance(folder, Path)]
    found = [path for folder in folders if folder.is_dir() for path in folder.glob(".*.tmp")]
    return sorted(str(path) for path in found if store.layout.is_own(final_name(path.name)))


def verify(store: LatentStore, *, progress: Callable[[int, int], None] | None = None) -> list[tuple[int, str]]:
    """Read every byte of every item: (position, what is wrong) of those that are not as they were written.

    In object storage that is what lies there, whatever this node has kept of it.
    """
    store = store.without_copies()
    order = np.lexsort((store.column("row"), store.words("shard")[1]))
    found: list[tuple[int, str]] = []
    done = 0
    step = 4096 if isinstance(store.layout.root, Path) else 256
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(order), step):
            part: list[int] = order[start : start + step].tolist()
            with suppress(LatentStoreError):  # which `check` says of each
                store.expect(part)
            found += [(i, bad) for i, bad in zip(part, pool.map(store.check, part), strict=True) if bad is not None]
            done += len(part)
            if progress is not None:
                progress(done, len(order))
    return sorted(found)


def verify_files(store: LatentStore) -> list[tuple[str, str]]:
    """Read what the files say of themselves, also where opening a store spares it: (file, what is wrong).

    That is `store.json`, every manifest, and the header and `entries` of every shard; and the rows of the manifest that
    is in force are compared with those of the shards. What opening the store found already comes first.
    """
    found = dict(store.damage)
    layout = store.layout
    try:
        store.layout.images_root()
    except LatentStoreError as error:
        found[layout.store_file.name] = str(error)
    for path in layout.manifests():
        with suppress(FileNotFoundError):
            try:
                manifest_of(layout, path, {})
            except LatentStoreError as error:
                found.setdefault(path.name, str(error))
    for name, info in store.shards.items():
        with suppress(FileNotFoundError):
            try:
                rows, stated = self_described(layout, name, (layout.shards / name).stat().st_size)
            except LatentStoreError as error:
                found[name] = str(error)
                continue
            if stated != info or not _are_among(store.rows_in(name), rows):
                for manifest in layout.manifests():
                    found.setdefault(manifest.name, f"a manifest says other things of {name} than that")
    return list(found.items())


_NEWER = ("caption", "source_hash")  # may be newer in a manifest


def _are_among(some: Any, rows: Any) -> bool:
    """Whether rows of a shard that a manifest has are those that the shard has itself."""
    pa, pc, _ = arrow()
    at = pc.index_in(some["row"].combine_chunks(), value_set=rows["row"].combine_chunks())
    if at.null_count:
        return False

    def plain(table: Any) -> Any:
        table = table.drop_columns(list(_NEWER))
        fields = [pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type)
                  for f in table.schema]  # fmt: skip
        return table.cast(pa.schema(fields)).combine_chunks()

    return bool(plain(some).equals(plain(rows.take(at))))
