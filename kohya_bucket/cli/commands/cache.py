"""`kohya-bucket cache …`: look after latents that are stored, and keep image sizes between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kohya_bucket.checks import one_of
from kohya_bucket.cli.console import say, say_first, scan_progress
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import AsJson, Quiet, Recursive, Sources, check_output, engine_of, family_of
from kohya_bucket.cli.options import path as folder
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import argument
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.latents import LatentStore
    from kohya_bucket.latents.maintenance import MaintenanceReport, StoreStatus
    from kohya_bucket.trainers.door.cache_files import Exchange


_Store = Annotated[Path, typer.Argument(parser=folder, help="The store's folder, or its address, as s3://…")]
SUBCOMMANDS = "status", "verify", "prune", "pack", "import_", "export", "sizes"


def status(
    store: _Store,
    images: Path | None = opt(None, "", "--image-dir"),
    hash: bool = opt(False, "", "--hash"),
    as_json: AsJson = False,
) -> None:
    """What is in a store, what is stale, and why. Exit code 1 if anything is damaged or stale."""
    from kohya_bucket.latents import maintenance as state

    seen = state.status(_open(store), images_root=images, content=hash)
    if as_json:
        groups = [
            {"collection": c, "bucket": list(b), "dtype": d, "kind": k, "vae": v, "items": n}
            for (c, b, d, k, v), n in sorted(seen.groups.items())
        ]
        typer.echo(json.dumps(vars(seen) | {"groups": groups, "healthy": seen.healthy}, indent=1))
    else:
        _print_status(seen, store)
    if not seen.healthy:
        raise typer.Exit(1)


def verify(store: _Store, quiet: Quiet = False) -> None:
    """Read a store and check it: checksums, headers, descriptions. Exit code 1 if anything is damaged."""
    from kohya_bucket.latents import maintenance as state

    opened = _open(store)
    files = state.verify_files(opened)
    with scan_progress("reading", quiet=quiet) as progress:
        bad = state.verify(opened, progress=progress)
    sources = opened.strings("source")
    for name, problem in [*files, *((sources[i], problem) for i, problem in bad)]:
        say(f"  {name}: {problem}")
    say(f"{counted(len(opened), 'item')} read, {len(bad)} damaged, {counted(len(files), 'file')} unusable")
    if bad or files:
        again = "precompute encodes it again" if opened.of_images else "training encodes these captions again"
        say(f"kohya-bucket cache prune {argument(store)} --damaged takes that out, and {again}", err=True)
        raise typer.Exit(1)


def prune(
    store: _Store,
    images: Path | None = opt(None, "", "--image-dir"),
    gone: bool = opt(False, "Drop items whose image is gone.", "--gone"),
    stale: bool = opt(False, "Drop items whose image has changed.", "--stale"),
    drop_collection: str | None = opt(None, "Drop this whole part of the store."),
    damaged: bool = opt(False, "Read everything, and drop what is damaged; encode it again afterwards.", "--damaged"),
) -> None:
    """Free the space of replaced rows and of what crashes left. Not while something writes."""
    from kohya_bucket.latents.maintenance import check_sources, source_paths
    from kohya_bucket.latents.maintenance import prune as prune_store

    opened = _open(store)
    drop: set[int] = set()
    if (gone or stale) and not opened.of_images:
        raise ConfigError(f"{store} holds captions, not images, so nothing there is gone or stale: leave that out")
    if gone or stale:
        absent, changed = check_sources(opened, source_paths(opened, images))
        if gone and len(opened) and absent.all():
            raise ConfigError(
                f"none of the images of {store} is there: it was moved away from them; nothing is dropped. "
                "Give their folder by --image-dir"
            )
        # by item, not by image: another collection may hold the same image as it is now
        unwanted = (absent & gone) | (changed & stale)
        drop |= set(unwanted.nonzero()[0].tolist())
    if drop_collection is not None:
        if drop_collection not in opened.collections():
            raise ConfigError(f"{store} has no collection {drop_collection!r}, but {opened.collections()}")
        drop |= {i for i, name in enumerate(opened.strings("collection")) if name == drop_collection}
    done = prune_store(opened, drop, damaged=damaged, images_root=images)
    say_first([f"{name}: {problem}" for name, problem in done.damaged])
    say(
        f"{counted(done.dropped, 'item')} dropped, {counted(len(done.removed), 'file')} removed, "
        f"about {abs(done.freed) / 1e6:.1f} MB {'freed' if done.freed >= 0 else 'more than before'}"
    )
    store_file = opened.layout.store_file.name
    _end_if_not_removed(done)
    if images is None and any(name == store_file for name, _ in done.damaged):
        say(f"{store_file} stays: add --image-dir DIR to write it again")
        raise typer.Exit(1)
    if not damaged:
        _end_if_damaged(opened, store, "so only the rest was pruned")


def pack(
    store: _Store,
    output: Path | None = opt(
        None, "Write a new store to this folder or address, for another machine.", "--output", "-o", parser=folder
    ),
) -> None:
    """Rewrite a store in as few files as possible. Not while something writes."""
    from kohya_bucket.latents.items import TEXT_FOLDER
    from kohya_bucket.latents.maintenance import pack as pack_store
    from kohya_bucket.latents.store.storage import is_there

    opened = _open(store)
    before = len(opened.shards)
    done = pack_store(opened, output)
    say(f"{counted(done.copied, 'item')} copied; {counted(before, 'shard')} before, {done.shards} now")
    if output is not None and is_there(text := opened.layout.root / TEXT_FOLDER):
        there = argument(output / TEXT_FOLDER)
        say(f"outputs of captions are a store of their own: kohya-bucket cache pack {argument(text)} -o {there}")
    _end_if_not_removed(done)
    _end_if_damaged(opened, store, "so what they hold was not packed")


def import_(
    path: Annotated[list[str], typer.Argument(help="Folders of images with sd-scripts' npz beside them.")],
    output: Path = opt(..., "The store's folder, or its address.", "--output", "-o", parser=folder),
    arch: str = opt(...),
    dtype: str = opt("float32"),
    vae: str = opt(""),
    collection: str = opt(""),
    quiet: Quiet = False,
) -> None:
    """Take sd-scripts' npz into a store.

    Files that sd-scripts made itself do not say which VAE made them. Name it with --vae, and training takes them as
    they are; without it they would be encoded again. In float32 every bit is kept.
    """
    from kohya_bucket.cli.encoding import vae_hash_of
    from kohya_bucket.cli.sources import images_in
    from kohya_bucket.latents.dtypes import dtype_name
    from kohya_bucket.latents.store.layout import common_root
    from kohya_bucket.trainers.door.registry import usual_trainer

    caches = usual_trainer().cache_files()
    family = _family(arch, usual_trainer().cached_families())
    images = images_in(path)
    root = common_root(images, output)
    with scan_progress("importing", quiet=quiet) as progress:
        done = caches.import_latents(
            images, output, family, images_root=root, dtype=dtype_name(dtype),
            vae=vae_hash_of(vae, family.name) if vae else "", collection=collection, progress=progress,
        )  # fmt: skip
    _print_exchange(done, "imported")
    if done.skipped:
        raise typer.Exit(1)


def export(
    store: _Store,
    arch: str = opt(...),
    output: Path | None = opt(
        None, "Write to this folder instead of beside the images.", "--output", "-o", parser=folder
    ),
    images: Path | None = opt(None, "", "--image-dir"),
    collection: str = opt(""),
    for_: str = opt("", "", "--for"),
    quiet: Quiet = False,
) -> None:
    """Write a store's latents as npz for unmodified sd-scripts."""
    from kohya_bucket.trainers.door.registry import usual_trainer

    caches = usual_trainer().cache_files()
    family = _family(arch, usual_trainer().cached_families()).read_by(caches.version(for_))
    opened = _open(store)
    with scan_progress("exporting", quiet=quiet) as progress:
        done = caches.export_latents(
            opened, family, output, images_root=images, collection=collection, progress=progress
        )
    _print_exchange(done, "exported")
    _end_if_damaged(opened, store, "so what they hold was not exported")
    if done.skipped:
        raise typer.Exit(1)


def sizes(
    path: Sources,
    output: Path = opt(..., "The Parquet file to write.", "--output", "-o"),
    refresh: bool = opt(False, "Reuse rows of --output for unchanged files.", "--refresh"),
    hash: bool = opt(False, "", "--hash"),
    recursive: Recursive = True,
    workers: int | None = opt(None, usual=False, min=1),
    engine: str = opt("local", usual=False),
    quiet: Quiet = False,
) -> None:
    """Read every image's size into a Parquet file, for later runs."""
    from kohya_bucket.cli.sources import images_in, tars_in
    from kohya_bucket.images import MetadataCache, ScanInterrupted
    from kohya_bucket.images.metadata_cache import is_metadata_cache
    from kohya_bucket.images.tar_index import is_tar_index

    kinds = is_metadata_cache, is_tar_index
    check_output("--output", output, "a Parquet file", path, lambda file: any(kind(str(file)) for kind in kinds))
    runs_on = engine_of(engine)
    if (tars := tars_in(path, output if refresh and output.is_file() else None, runs_on, hash=hash)) is not None:
        tars.save(output)
        if not quiet:
            say(f"{len(tars)} images of {counted(len(tars.shards), 'shard')} in {output}")
        return
    read = MetadataCache.load(output).refresh if refresh and output.exists() else MetadataCache.build
    paths = images_in(path, recursive=recursive)
    try:
        with scan_progress("reading headers", quiet=quiet) as progress:
            cache = read(paths, hash=hash, workers=workers, engine=runs_on, progress=progress)
    except ScanInterrupted as interrupt:
        if not refresh and output.exists():  # its rows may be more than what was read until now
            kept = f"{output} stays as it was: --refresh reads only what is new or changed"
            raise KeyboardInterrupt(f"{interrupt}; {kept}") from None
        if interrupt.cache is not None and len(interrupt.cache):
            interrupt.cache.save(output)
            kept = f"{counted(len(interrupt.cache), 'row')} kept in {output}: continue with --refresh"
            raise KeyboardInterrupt(f"{interrupt}; {kept}") from None
        raise
    cache.save(output)
    changes = cache.changes
    if quiet or changes is None:
        return
    say(
        f"{counted(len(cache), 'file')} in {output}: {changes.reused} unchanged, {changes.reread} read again, "
        f"{changes.added} new, {changes.dropped} gone, {changes.unreadable} unreadable"
    )
    lines = [f"{cache.paths[i]}: {cache.reasons[i]}" for i in sorted(cache.reasons)]
    say_first(lines, rest="; all of them are in the file's column 'reason'", err=True)


def _open(store: Path) -> LatentStore:
    from kohya_bucket.latents import LatentStore

    return LatentStore(store)


def _family(name: str, families: Mapping[str, Any]) -> Any:
    return families[one_of("--arch", family_of(name), families, ConfigError)]


def _print_status(seen: StoreStatus, store: Path) -> None:
    shown, per_item = argument(store), seen.nbytes / max(1, seen.items)
    say(
        f"{store}: {counted(seen.items, 'item')}, {seen.nbytes / 1e6:.1f} MB, {counted(seen.shards, 'shard')}, "
        f"{per_item:.0f} B an item"
    )
    for (collection, bucket, dtype, kind, vae), n in sorted(seen.groups.items()):
        name = f"{collection} " if collection else ""
        if kind == "text":
            say(f"  {name}captions, text encoders {vae[:8] or 'unknown'}: {n}")
        else:
            say(f"  {name}{bucket[0]}x{bucket[1]} {dtype} {kind} VAE {vae[:8]}: {n}")
    for count, what, text in (
        (seen.superseded, "row", f"replaced by newer ones: `kohya-bucket cache prune {shown}` frees the space"),
        (seen.unindexed, "shard", f"not in the manifest yet, which makes opening slower: `cache pack {shown}`"),
        (len(seen.temporary), "unfinished file", f"there: `cache prune {shown}` removes that when it is an hour old"),
    ):
        if count:
            say(f"{counted(count, what, 'is', 'are')} {text}")
    if seen.no_images:
        say("the images are not here, so their state is unknown: give their folder with --image-dir")
    again = "run the same `precompute` again" if seen.of_images else "training encodes these captions again"
    for names, what, remedy in (
        (seen.absent * (not seen.no_images), "its image is gone",
         f"if it was moved, give its new folder with --image-dir; else `cache prune {shown} --gone` drops the latent"),
        (seen.changed, "its image changed",
         f"{again}, which encodes it again; `cache prune {shown} --stale` drops the old latent"),
        (seen.missing or [], "an image without a latent", "run `precompute` for that folder again"),
        ([f"{name}: {problem}" for name, problem in seen.damage], "damaged",
         f"`cache prune {shown} --damaged` takes it out; then {again}"),
    ):  # fmt: skip
        if names:
            say(f"{what}: {len(names):,}; what to do: {remedy}")
            say_first(names)
    healthy = "everything is up to date"
    if seen.of_images and seen.missing is None:
        healthy = "all that is in it is up to date; whether images are missing is told with --image-dir"
    say(healthy if seen.healthy else "not up to date: what to do is said above")


def _end_if_not_removed(done: MaintenanceReport) -> None:
    if done.in_use:
        files = counted(len(done.in_use), "file", "is", "are")
        remedy = "close what has it open, or make its folder writable, and run again"
        say(f"{files} not removed: {done.in_use[0]}; {remedy}", err=True)
        raise typer.Exit(1)


def _print_exchange(done: Exchange, verb: str) -> None:
    say_first([f"{name}: {why}" for name, why in done.skipped])
    say(f"{done.done} latents {verb}, {len(done.skipped)} skipped")


def _end_if_damaged(opened: LatentStore, store: Path, so: str) -> None:
    """Exit code 1 and why, where a store has less than it says; a damaged manifest has a twin."""
    if lacking := [f"{name}: {problem}" for name, problem in opened.damage if not name.endswith(".parquet")]:
        say_first(lacking)
        files = counted(len(lacking), "file", "is", "are")
        say(f"{files} gone or damaged, {so}; what to do: kohya-bucket cache status {argument(store)}", err=True)
        raise typer.Exit(1)
