"""What is in a store and what is wrong with it; packing it into few large shards or a copy, pruning what is of no use.

Rows are copied into new shards first, and the old files go last. Whatever interrupts this, every item is in at least
one whole shard at any time. Shards that another process has open are left where the system refuses to remove them
(Windows), and named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError, reading
from kohya_bucket.files import TEMPORARY_AGE, final_name
from kohya_bucket.images.origins import Origins
from kohya_bucket.latents.fingerprint import source_changes
from kohya_bucket.latents.store.contents import manifest_of, self_described
from kohya_bucket.latents.store.entries import arrow
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout, paths_of, remedy
from kohya_bucket.latents.store.storage import StorePath
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.texts import counted


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
        changed, absent: sources of items whose image has changed, or is not there.
        no_images: none of the sources is there, so the store was moved away from its images: nothing is stale.
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
    found = [folder / name for folder in folders for name in _listed(folder)]
    return sorted(str(path) for path in found if store.layout.is_own(final_name(path.name)))


def _listed(folder: Path) -> list[str]:
    with suppress(FileNotFoundError), reading(folder):
        return os.listdir(folder)
    return []


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
                with reading(layout.shards / name):
                    nbytes = (layout.shards / name).stat().st_size
                rows, stated = self_described(layout, name, nbytes)
            except LatentStoreError as error:
                found[name] = str(error)
                continue
            if stated != info or not _are_among(store.rows_in(name), rows):
                for manifest in layout.manifests():
                    found.setdefault(manifest.name, f"a manifest describes {name} differently")
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


_EXPECTED = 64  # items that object storage is asked for together


@dataclass
class MaintenanceReport:
    """What was done.

    Attributes:
        copied: items that were moved into new shards.
        dropped: items that are gone from the store.
        removed: files that were deleted.
        in_use: files that could not be removed, and why: a program holds them open, or their folder is read-only.
        damaged: (item or file, what is wrong with it).
        shards: how many there are now, those in use among them.
        freed: bytes of shards; below zero while what was copied is in use.
    """

    copied: int = 0
    dropped: int = 0
    removed: list[str] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    shards: int = 0
    freed: int = 0


def copy_items(store: LatentStore, items: Sequence[int], writer: StoreWriter) -> None:
    """Write items of `store` again, with their checksums looked at on the way and their numbers kept."""
    numbers = store.column("written_ns")
    for turn, i in enumerate(items):
        if turn % _EXPECTED == 0:
            store.expect(items[turn : turn + _EXPECTED])
        entry = store.entry(i)
        if store.info(i).arrays:
            kept = {name: replace(packed, bits=np.array(packed.bits)) for name, packed in store.packed(i).items()}
            writer.add_text(entry, kept, sequence=int(numbers[i]))
            continue
        flip, mask = entry.fingerprint.flip, entry.fingerprint.mask
        flipped = np.array(store.read(i, flipped=True)) if flip else None
        alpha = store.read_mask(i) if mask else None
        writer.add(
            entry, np.array(store.read(i)), flipped=flipped, mask=None if alpha is None else np.array(alpha),
            space=store.info(i).space, sequence=int(numbers[i]),
        )  # fmt: skip


def remove_shards(
    store: LatentStore, names: Sequence[str], done: MaintenanceReport, others: Iterable[StorePath] = (),
    given_up: Iterable[str] = (),
) -> None:  # fmt: skip
    """Index what is there without `names`, whose items are in other shards or to be dropped; then delete those, and
    `others`, and count what the shards take now. Nothing is read any more once something is deleted."""
    emptied = [store.shards[name] for name in names]
    before = sum(info.nbytes for info in store.shards.values())
    store.refresh(without=names)
    write_manifest(store, emptied=emptied, given_up=given_up)
    store.release()
    for path in [*others, *(store.layout.shards / name for name in names)]:
        remove_file(path, done)
    left = [*store.shards.values(), *(info for info in emptied if info.name not in done.removed)]
    done.shards, done.freed = len(left), before - sum(info.nbytes for info in left)


def remove_file(path: StorePath, done: MaintenanceReport) -> None:
    """Remove one file, and note whether it is gone or in use."""
    try:
        path.unlink()
        done.removed.append(path.name)
    except FileNotFoundError:
        pass
    except OSError as error:
        done.in_use.append(f"{path.name} ({error.strerror or error})")


def pack(
    store: LatentStore,
    target: str | os.PathLike[str] | None = None,
    *,
    shard_bytes: int = 256 << 20,
) -> MaintenanceReport:
    """Bring the items into as few shards as there need be, in order; in place or as a new store in `target`.

    A store in `target` is complete in itself: it can be carried elsewhere and trained from without the images.

    Raises:
        LatentStoreError: `target` holds a store already, or an item is damaged.
    """
    if target is not None:
        if Layout(target).shard_sizes():
            raise LatentStoreError(f"{target} holds a latent store already: choose an empty folder")
        if damaged := sum(not name.endswith(".parquet") for name, _ in store.damage):
            raise LatentStoreError(
                f"{store.layout.root} has {counted(damaged, 'damaged shard')}, which a copy would not have: first "
                f"{remedy(store.layout.root)}"
            )
        root = store.layout.images_root()
        with StoreWriter(target, images_root=root, shard_bytes=shard_bytes, flush_seconds=None) as writer:
            copy_items(store, range(len(store)), writer)
        packed = LatentStore(target)
        write_manifest(packed)
        return MaintenanceReport(copied=len(packed), shards=len(packed.shards))
    done = MaintenanceReport()
    rows = _rows_by_shard(store)
    small = [name for name, items in rows.items() if items and store.shards[name].nbytes < 0.7 * shard_bytes]
    empty = [name for name, items in rows.items() if not items]  # copied before, and in use until now
    keep = sorted(i for name in small for i in rows[name])
    if _already_packed(store, small, keep):
        small, keep = [], []
    if not small and not empty:
        write_manifest(store)
        done.shards = len(store.shards)
        return done
    with StoreWriter(store.layout.root, shard_bytes=shard_bytes, flush_seconds=None) as writer:
        copy_items(store, keep, writer)
    done.copied = len(keep)
    remove_shards(store, [*small, *empty], done)
    return done


def _rows_by_shard(store: LatentStore) -> dict[str, list[int]]:
    """Items that can be read, by the shard they lie in."""
    rows: dict[str, list[int]] = {name: [] for name in store.shards}
    for i in range(len(store)):
        rows[store.info(i).name].append(i)
    return rows


def _already_packed(store: LatentStore, small: Sequence[str], keep: Sequence[int]) -> bool:
    """Whether copying would give the same shards again: one small one per kind of row, without dead rows."""
    names = ["bucket_width", "bucket_height", "dtype", "kind", "flip", "mask", "collection", "shard"]
    found = store.table.take(np.array(keep, dtype=np.int64)).group_by(names, use_threads=False).aggregate([])
    kinds = set()
    for row in found.to_pylist():
        info = store.shards[row["shard"]]
        layouts = tuple((name, info.tensors[name].dtype, info.tensors[name].shape[1:]) for name in info.arrays)
        kinds.add((*list(row.values())[:-1], info.space, tuple(info.arrays.items()), layouts))
    rows = sum(store.shards[name].rows for name in small)
    return len(kinds) >= len(small) and rows == len(keep)


def prune(
    store: LatentStore, drop: Iterable[int] = (), *, damaged: bool = False, images_root: Path | None = None
) -> MaintenanceReport:
    """Take out `drop` (positions), rows that newer ones replaced, and files of writers that died.

    Run it while nothing writes into the store.

    Args:
        damaged: read everything, and take out items and files that are not as they were written; what is whole in such
            a file is kept.
        images_root: where the images are, to be written where `store.json` does not say so any more.
    """
    done = MaintenanceReport()
    dropped = set(drop)
    bad_files: list[str] = []
    if damaged:
        files, items = verify_files(store), verify(store)
        sources = store.strings("source")
        done.damaged = [*files, *((sources[i], problem) for i, problem in items)]
        dropped |= {i for i, _ in items}
        bad_files = [name for name, _ in files]
    live = {name: [i for i in items if i not in dropped] for name, items in _rows_by_shard(store).items()}
    rows = {name: info.rows for name, info in store.shards.items()}
    loose = [name for name, items in live.items() if len(items) < rows[name] or name in bad_files]
    done.dropped = len(dropped)
    done.copied = sum(len(live[name]) for name in loose)
    old: list[StorePath] = [path for path in map(Path, temporary_files(store)) if _is_left_over(path)]
    own = (store.layout.own_file(name) for name in set(bad_files) - set(loose))
    old += [path for path in own if path is not None]  # store.json is written again, or stays
    lost_root = damaged and images_root is not None
    anew = lost_root and store.layout.store_file.name in bad_files
    if anew:
        store.layout.check_own()
    elif lost_root:
        store.layout.create(images_root)
    with StoreWriter(store.layout.root) as writer:
        copy_items(store, [i for name in loose for i in live[name]], writer)
    remove_shards(store, loose, done, old, bad_files)
    if anew:
        remove_file(store.layout.store_file, done)
        store.layout.create(images_root)
    return done


def _is_left_over(path: Path) -> bool:
    with suppress(OSError):  # gone, or not to be looked at now
        return time.time() - path.stat().st_mtime > TEMPORARY_AGE
    return False
