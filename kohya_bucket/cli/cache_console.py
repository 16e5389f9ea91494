"""What the commands of `cache` print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kohya_bucket.cli.console import say
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.latents.maintenance import MaintenanceReport
    from kohya_bucket.latents.npz.exchange import Exchange
    from kohya_bucket.latents.store.state import StoreStatus

__all__ = ["print_exchange", "print_files_in_use", "print_rows", "print_status"]

_SHOWN = 10


def print_status(found: StoreStatus, store: Path) -> None:
    """What is in a store, and what is wrong with it."""
    per_item = found.nbytes / max(1, found.items)
    say(
        f"{store}: {counted(found.items, 'item')}, {found.nbytes / 1e6:.1f} MB, {counted(found.shards, 'shard')}, "
        f"{per_item:.0f} B an item"
    )
    for (collection, bucket, dtype, kind, vae), n in sorted(found.groups.items()):
        name = f"{collection} " if collection else ""
        if kind == "text":
            say(f"  {name}captions, text encoders {vae[:8] or 'unknown'}: {n}")
        else:
            say(f"  {name}{bucket[0]}x{bucket[1]} {dtype} {kind} VAE {vae[:8]}: {n}")
    for count, text in (
        (found.superseded, "rows replaced by newer ones (cache prune frees them)"),
        (found.unindexed, "shards not in the manifest yet (opened a little slower; cache pack indexes them)"),
        (len(found.temporary), "unfinished files, of runs that are active or were stopped"),
    ):
        if count:
            say(f"{count} {text}")
    if found.no_images:
        say("the images are not here, so their state is unknown; give their folder with --images")
    else:
        print_rows([(path, "its image is gone") for path in found.absent])
    print_rows([(path, "its image changed: stale") for path in found.changed])
    print_rows(found.damage)
    say("everything is up to date" if found.healthy else "see above")


def print_rows(rows: list[tuple[str, str]], limit: int | None = _SHOWN) -> None:
    """(name, text) pairs, a line each; with a limit, how many more there are."""
    shown = rows if limit is None else rows[:limit]
    for name, text in shown:
        say(f"{name}: {text}")
    if len(rows) > len(shown):
        say(f"… and {len(rows) - len(shown)} more")


def print_files_in_use(done: MaintenanceReport) -> None:
    """Files that could not be removed."""
    if done.in_use:
        say(
            f"{counted(len(done.in_use), 'file', 'is', 'are')} open in another program and not removed yet: "
            f"{done.in_use[0]}",
            err=True,
        )


def print_exchange(done: Exchange, verb: str, what: str = "latents") -> None:
    """How many latents, or outputs of text encoders, were imported or exported, and which were not."""
    print_rows(done.skipped)
    say(f"{done.done} {what} {verb}, {len(done.skipped)} skipped")
