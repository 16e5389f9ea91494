"""A store's status and damage; packing it into few large shards or into a copy; pruning what is of no use.

Rows are copied into new shards first, and old files are removed last: whatever interrupts this, every item is in at
least one whole shard at any time. Shards that another process has open stay where the system refuses to remove them
(Windows), and are named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError, reading
from kohya_bucket.files import TEMPORARY_AGE, final_name
from kohya_bucket.images.listing import file_key, list_images
from kohya_bucket.images.origins import Origins
from kohya_bucket.latents.fingerprint import source_changes, stamps_shared
from kohya_bucket.latents.store.contents import manifest_of, self_described
from kohya_bucket.latents.store.entries import SEQUENCE, WORDS
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout, paths_of, remedy
from kohya_bucket.latents.store.storage import StorePath
from kohya_bucket.latents.store.writer import OF_A_SHARD, StoreWriter, write_manifest
from kohya_bucket.texts import counted


def check_sources(
    store: LatentStore, paths: list[str], *, content: bool = False
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """[N] whether each item's file is absent, and whether it has changed; `paths` has one path per item.

    With `content`, files with a stored hash are read in full, which shows an edit that kept length and time.
    """
    images = Origins.named(paths)
    nbytes, mtimes = images.stamps()
    absent = nbytes < 0
    rows = np.flatnonzero(~absent)
    stored, files = store.source_columns(rows), {"source_bytes": nbytes[rows], "source_mtime_ns": mtimes[rows]}
    inside = images.inside[rows]
    always = content | (stamps_shared(*files.values()) & ~inside)
    changes = source_changes(stored, files, lambda k: images.hash(int(rows[k])), inside=inside, always=always)
    changed = np.zeros(len(store), dtype=bool)
    changed[rows] = changes > 0
    return absent, changed


@dataclass
class StoreStatus:
    """State of a store.

    Attributes:
        items: number of readable items.
        nbytes, shards: size of the shards on disk, and their number.
        groups: number of items by (collection, bucket, dtype, kind, vae).
        superseded: rows on disk that newer ones have replaced.
        unindexed: shards that the manifest does not name yet.
        damage: (file, problem).
        changed, absent: sources of items whose image has changed, or is gone.
        missing: images of the folder that was named which have no item; None where none was named.
        no_images: all sources are missing, so the store was moved away from its images: nothing is stale.
        temporary: leftover files.
        of_images: it holds latents of images, not text-encoder outputs.
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
    missing: list[str] | None = None
    no_images: bool = False
    temporary: list[str] = field(default_factory=list)
    of_images: bool = True

    @property
    def healthy(self) -> bool:
        """Nothing is damaged, stale or missing."""
        return not (self.damage or self.changed or self.missing or (self.absent and not self.no_images))


def source_paths(store: LatentStore, images_root: Path | None = None) -> list[str]:
    """Path of the image behind each item."""
    return paths_of(store.strings("source"), store.layout.images_root() if images_root is None else images_root)


def status(store: LatentStore, *, images_root: Path | None = None, content: bool = False) -> StoreStatus:
    """Look at a store and at its image files (length and time; with `content` also their hashes).

    Which images should be in it is known of a folder `images_root` that is named, and not of the store alone.
    """
    paths = source_paths(store, images_root)
    absent = changed = np.zeros(len(store), dtype=bool)
    missing = None
    if store.of_images:
        absent, changed = check_sources(store, paths, content=content)
        if images_root is not None:
            stored = set(map(file_key, paths))
            missing = [image for image in list_images(images_root) if file_key(image) not in stored]
    names = ["collection", "dtype", "kind", "vae", "bucket_width", "bucket_height"]
    groups: dict[tuple[str, tuple[int, int], str, str, str], int] = {}
    for row in store.table.group_by(names, use_threads=False).aggregate([([], "count_all")]).to_pylist():
        key = (row["collection"], (row["bucket_width"], row["bucket_height"]), row["dtype"], row["kind"], row["vae"])
        groups[key] = row["count_all"]
    return StoreStatus(
        items=len(store),
        nbytes=sum(store.layout.shard_sizes().values()),
        shards=len(store.shards),
        groups=groups,
        superseded=store.replaced_rows(),
        unindexed=len(store.unindexed),
        damage=list(store.damage),
        changed=[paths[i] for i in np.flatnonzero(changed).tolist()],
        absent=[paths[i] for i in np.flatnonzero(absent).tolist()],
        missing=missing,
        no_images=bool(len(store)) and bool(absent.all()),
        temporary=temporary_files(store),
        of_images=store.of_images,
    )


def temporary_files(store: LatentStore) -> list[str]:
    """Files that interrupted writers left behind, or running ones are writing. Object storage has none."""
    folders = [folder for folder in (store.layout.root, store.layout.shards) if isinstance(folder, Path)]
    final = {folder / name: final_name(name) for folder in folders for name in _listed(folder)}
    own = store.layout.store_file.name
    return sorted(str(path) for path, name in final.items() if name == own or store.layout.own_file(name))


def _listed(folder: Path) -> list[str]:
    with suppress(FileNotFoundError), reading(folder):
        return os.listdir(folder)
    return []


def verify(store: LatentStore, *, progress: Callable[[int, int], None] | None = None) -> list[tuple[int, str]]:
    """Read every byte of every item: (position, problem) of the damaged ones.

    For object storage this reads the storage itself, whatever copies this node has.
    """
    store = store.without_copies()
    order = np.lexsort((store.column("row"), store.words("shard")[1]))
    damaged: list[tuple[int, str]] = []
    done = 0
    step = 4096 if isinstance(store.layout.root, Path) else 256
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(order), step):
            part: list[int] = order[start : start + step].tolist()
            with suppress(LatentStoreError):  # `check` will say so for each item
                store.expect(part)
            problems = zip(part, pool.map(store.check, part), strict=True)
            damaged += [(i, problem) for i, problem in problems if problem is not None]
            done += len(part)
            if progress is not None:
                progress(done, len(order))
    return sorted(damaged)


def verify_files(store: LatentStore) -> list[tuple[str, str]]:
    """Read what the files say about themselves, which opening a store partly skips: (file, problem).

    These are `store.json`, all manifests, and the header and rows of every shard, whose description is compared with
    that in the manifest. Problems that opening the store found come first.
    """
    problems = dict(store.damage)
    layout = store.layout
    try:
        layout.images_root()
    except LatentStoreError as error:
        problems[layout.store_file.name] = str(error)
    for path in layout.manifests():
        with suppress(FileNotFoundError):
            try:
                manifest_of(layout, path, {})
            except LatentStoreError as error:
                problems.setdefault(path.name, str(error))
    sizes = layout.shard_sizes()
    for name in sorted(store.shards.keys() & sizes.keys()):
        with suppress(FileNotFoundError):
            try:
                _, stated = self_described(layout, name, sizes[name])
            except LatentStoreError as error:
                problems[name] = str(error)
                continue
            if stated != store.shards[name]:
                for manifest in layout.manifests():
                    problems.setdefault(manifest.name, f"a manifest describes {name} differently")
    return list(problems.items())


_EXPECTED = 64  # items that are requested from object storage together


@dataclass
class MaintenanceReport:
    """What was done.

    Attributes:
        copied: number of items moved into new shards.
        dropped: number of items removed from the store.
        removed: files that were deleted.
        in_use: files that could not be removed, and why: a program has them open, or their folder is read-only.
        damaged: (item or file, problem).
        shards: number of shards now, including those in use.
        freed: bytes of shards; negative while copied ones are still in use.
    """

    copied: int = 0
    dropped: int = 0
    removed: list[str] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    shards: int = 0
    freed: int = 0


def copy_items(store: LatentStore, items: Sequence[int], writer: StoreWriter) -> None:
    """Write items of `store` again under their old numbers; raises for a damaged one.

    Those that can share a shard come together, so that memory holds one shard, and not one of each bucket.
    """
    numbers = store.column(SEQUENCE)
    kinds = np.column_stack([store.words(n)[1] if n in WORDS else store.column(n) for n in OF_A_SHARD])
    at = np.asarray(items, dtype=np.int64)
    at = at[np.lexsort(kinds[at].T)]
    is_next = np.append(False, (kinds[at[1:]] != kinds[at[:-1]]).any(axis=1))
    for turn, i in enumerate(at.tolist()):
        if turn % _EXPECTED == 0:
            store.expect(at[turn : turn + _EXPECTED])
        if is_next[turn]:
            writer.flush()
        entry = store.entry(i)
        if store.info(i).arrays:
            outputs = {name: replace(packed, bits=np.array(packed.bits)) for name, packed in store.packed(i).items()}
            writer.add_text(entry, outputs, sequence=int(numbers[i]))
            continue
        flipped = np.array(store.read(i, flipped=True)) if entry.fingerprint.flip else None
        mask = store.read_mask(i) if entry.fingerprint.mask else None
        plain, mask = np.array(store.read(i)), None if mask is None else np.array(mask)
        writer.add(entry, plain, flipped=flipped, mask=mask, space=store.info(i).space, sequence=int(numbers[i]))


def remove_shards(
    store: LatentStore,
    names: Sequence[str],
    done: MaintenanceReport,
    others: Iterable[StorePath] = (),
    given_up: Iterable[str] = (),
) -> None:
    """Index the store without the shards `names`, whose items are in other shards or dropped; then delete these and
    `others`, and count what is left. Nothing is read once something is deleted."""
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
    """Remove one file, and record whether it is gone or in use."""
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
    """Copy the items in order into as few shards as possible, in place or into a new store in `target`.

    A store in `target` is self-contained: it can be moved elsewhere and trained from without the images. A copy that
    was interrupted is continued, and one that is whole stays as it is.

    Raises:
        LatentStoreError: `target` already holds another store, or an item is damaged.
    """
    if target is not None:
        items: Sequence[int] = range(len(store))
        if Layout(target).shard_sizes():  # of a copy that was interrupted, or of another store
            there = LatentStore(target)
            copied, wanted = set(_keys(there)), set(_keys(store))
            if not copied <= wanted or (there.layout.manifests() and copied != wanted):
                raise LatentStoreError(f"{target} already holds another latent store: choose an empty folder")
            items = [i for i, key in enumerate(_keys(store)) if key not in copied]
        if damaged := sum(not name.endswith(".parquet") for name, _ in store.damage):
            raise LatentStoreError(
                f"{store.layout.root} has {counted(damaged, 'damaged shard')}, which a copy would not have: first "
                f"{remedy(store.layout.root)}"
            )
        root = store.layout.images_root()
        with StoreWriter(target, images_root=root, shard_bytes=shard_bytes, flush_seconds=None) as writer:
            copy_items(store, items, writer)
        packed = LatentStore(target)
        write_manifest(packed)
        return MaintenanceReport(copied=len(packed), shards=len(packed.shards))
    done = MaintenanceReport()
    items_of = _items_by_shard(store)
    small = [name for name, items in items_of.items() if items and store.shards[name].nbytes < 0.7 * shard_bytes]
    empty = [name for name, items in items_of.items() if not items]  # copied before, and in use until now
    keep = sorted(i for name in small for i in items_of[name])
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


def _keys(store: LatentStore) -> Iterator[tuple[str, str, str | None, int]]:
    texts = (store.strings(name) for name in ("collection", "source", "caption"))
    return zip(*texts, store.column(SEQUENCE).tolist(), strict=True)


def _items_by_shard(store: LatentStore) -> dict[str, list[int]]:
    items: dict[str, list[int]] = {name: [] for name in store.shards}
    for i in range(len(store)):
        items[store.info(i).name].append(i)
    return items


def _already_packed(store: LatentStore, small: Sequence[str], keep: Sequence[int]) -> bool:
    """Whether copying would make the same shards again: one small shard per kind of row, without replaced rows."""
    table = store.table.take(np.array(keep, dtype=np.int64))
    groups = table.group_by([*OF_A_SHARD, "shard"], use_threads=False).aggregate([])
    kinds = set()
    for row in groups.to_pylist():
        info = store.shards[row["shard"]]
        layouts = tuple((name, info.tensors[name].dtype, info.tensors[name].shape[1:]) for name in info.arrays)
        kinds.add((*list(row.values())[:-1], info.space, tuple(info.arrays.items()), layouts))
    rows = sum(store.shards[name].rows for name in small)
    return len(kinds) >= len(small) and rows == len(keep)


def prune(
    store: LatentStore,
    drop: Iterable[int] = (),
    *,
    damaged: bool = False,
    images_root: Path | None = None,
) -> MaintenanceReport:
    """Remove the items `drop` (positions), rows that newer ones have replaced, and files of dead writers.

    Run it while nothing writes into the store.

    Args:
        damaged: read everything, and remove damaged items and files; whole items of a damaged file are kept.
        images_root: where the images are, for a `store.json` that is lost or damaged.
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
    # A shard with any row to remove is written again without it: what stays of it is copied, then it goes.
    live = {name: [i for i in items if i not in dropped] for name, items in _items_by_shard(store).items()}
    rows = {name: info.rows for name, info in store.shards.items()}
    rewritten = [name for name, items in live.items() if len(items) < rows[name] or name in bad_files]
    done.dropped = len(dropped)
    done.copied = sum(len(live[name]) for name in rewritten)
    # Everything else that goes: leftovers, damaged manifests, and shards of which nothing can be read.
    others: list[StorePath] = [path for path in map(Path, temporary_files(store)) if _is_left_over(path)]
    unusable = (store.layout.own_file(name) for name in set(bad_files) - set(rewritten))
    others += [path for path in unusable if path is not None]  # not store.json, which is written again or stays
    # A missing store.json is made first: the writer would make one without the root. A damaged one, if it is ours, is
    # replaced once all else is done.
    mend_root = damaged and images_root is not None
    replace_store_file = mend_root and store.layout.store_file.name in bad_files
    if replace_store_file:
        store.layout.check_own()
    elif mend_root:
        store.layout.create(images_root)
    # First the copies, then a manifest without the old shards, then these go.
    with StoreWriter(store.layout.root) as writer:
        copy_items(store, [i for name in rewritten for i in live[name]], writer)
    remove_shards(store, rewritten, done, others, bad_files)
    if replace_store_file:
        remove_file(store.layout.store_file, done)
        store.layout.create(images_root)
    return done


def _is_left_over(path: Path) -> bool:
    with suppress(OSError):  # gone, or unreadable now
        return time.time() - path.stat().st_mtime > TEMPORARY_AGE
    return False
