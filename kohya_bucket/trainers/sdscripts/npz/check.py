"""Whether and where an npz holds what is to be trained: whole, of the right shape, from the image as it is now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kohya_bucket.buckets.geometry import covering_sizes
from kohya_bucket.buckets.sizes import Size, as_pair
from kohya_bucket.errors import reading
from kohya_bucket.images.resize import choose_interpolation, resampler
from kohya_bucket.latents.fingerprint import Fingerprint, Stale, StaleReason, changed_since, why_stale
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.trainers.sdscripts.families import Family
from kohya_bucket.trainers.sdscripts.npz.names import further_path, usual_name
from kohya_bucket.trainers.sdscripts.npz.read_write import BrokenNpzError, OpenNpz, file_reason, read_note, rekey


@dataclass(frozen=True)
class NpzEntry:
    """Latents of one size on disk, or why they must be encoded (again).

    Attributes:
        path: the file.
        keys: what the names of their arrays end in.
        as_read: the family's readers take these, and no others, for the latents of that size.
        reasons: why they do not serve; none if they do.
    """

    path: Path
    keys: str
    as_read: bool
    reasons: list[StaleReason]


def npz_entry(
    path: Path, wanted: StoreEntry, arch: Family, image: Path, *, ignoring: Collection[Stale] = ()
) -> NpzEntry:
    """Look for latents that serve for `wanted`: in `path`, whichever kind of keys they have, and in the file beside.

    The file beside is that of further sizes, or the usual one: which one a size is in depends on the version of
    sd-scripts and on the datasets of a run.

    They serve only if they are finite and every byte of theirs is what was written: all are read, and compared with the
    checksums that a zip has. `ignoring` is as in `origin_reasons`.
    """
    fingerprint = wanted.fingerprint
    bucket = fingerprint.bucket_size
    parts = _parts(arch, bucket, fingerprint)

    def stale_reasons(file: OpenNpz, keys: str) -> list[StaleReason]:
        if unfit := _why_unfit(file, keys, parts, wanted.original_size):
            return [unfit]
        reasons = origin_reasons(file, keys, fingerprint, image, ignoring)
        # last, since every byte is read
        fault = None if reasons else file.fault(name + keys for name in parts)
        return [fault] if fault else reasons

    entry = _entry_in(path, bucket, arch, stale_reasons)
    if entry.reasons:
        usual = usual_name(path.name)
        other = path.with_name(usual) if usual else further_path(path, bucket)
        beside = _entry_in(other, bucket, arch, stale_reasons)
        if not beside.reasons:
            return replace(beside, as_read=False)
    return entry


def origin_reasons(
    file: OpenNpz, keys: str, wanted: Fingerprint, image: Path, ignoring: Collection[Stale]
) -> list[StaleReason]:
    """Why latents were not made as `wanted`, of the image as it is now.

    Those without a note were made by sd-scripts itself: they serve if the image was not changed or renamed since, and
    the crop is in the middle. `ignoring` is as in `why_stale`; the type of the numbers never counts, npz hold float32.
    """
    noted, reasons = made_from(file, keys, image)
    if noted is not None:
        return why_stale(noted, wanted, image, ignoring=(Stale.DTYPE, *ignoring)) + reasons
    pairs = zip(wanted.resized_size, wanted.bucket_size, strict=True)
    middle = tuple((resized - bucket) // 2 for resized, bucket in pairs)
    moved = [] if wanted.crop == middle else [StaleReason(Stale.CROP, "not known", "{}x{}".format(*wanted.crop))]
    return moved if Stale.SOURCE in ignoring else moved + reasons


def trainers_fingerprint(
    nbytes: int, mtime_ns: int, vae: str, size: Size, bucket: Size, resized: Size | None = None,
    interpolation: str | None = None, *, flip: bool, mask: bool,
) -> Fingerprint:  # fmt: skip
    """Of latents that sd-scripts makes of an image, resized to cover its bucket unless `resized` says to what."""
    resized = resized or as_pair(covering_sizes(np.array([size]), np.array([bucket]))[0])
    name = "none"
    if tuple(resized) != tuple(size):
        name = choose_interpolation(size, resized, interpolation)
        name = f"{name}/{resampler(name, by_trainer=True)}"
    middle = (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2
    crop = getattr(resized, "crop", None) or middle
    return Fingerprint(
        nbytes, mtime_ns, "", vae, as_pair(bucket), as_pair(resized), crop, name, "float32", "latents", flip, mask
    )


def ensure_current(
    path: Path, wanted: StoreEntry, arch: Family, image: Path, *, ignoring: Collection[Stale] = ()
) -> tuple[list[StaleReason], bool]:
    """`npz_entry`'s reasons; and where latents serve that this family's readers would not take, put them where they do.

    Returns the reasons, and whether a file was written. Raises `LatentStoreError` where it cannot be written.
    """
    entry = npz_entry(path, wanted, arch, image, ignoring=ignoring)
    if entry.reasons or entry.as_read:
        return entry.reasons, False
    gone = rekey(entry.path, entry.keys, path, wanted.fingerprint.bucket_size, arch)
    return ([gone], False) if gone else ([], True)


def holds_npz(path: Path, bucket_size: Size, arch: Family) -> bool:
    """Whether there is anything of that size which this family's readers take, good or not."""

    def stale_reasons(file: OpenNpz, keys: str) -> list[StaleReason]:
        is_there = f"latents{keys}" in file.names and file.shape(f"latents{keys}") == arch.shape(bucket_size)
        return [] if is_there else [StaleReason(Stale.MISSING)]

    entry = _entry_in(path, bucket_size, arch, stale_reasons)
    return entry.as_read and not entry.reasons


def _entry_in(
    path: Path, bucket: Size, arch: Family, stale_reasons: Callable[[OpenNpz, str], list[StaleReason]]
) -> NpzEntry:
    """The latents in a file for which there are no reasons; else those that there is most to say about."""
    read_first = arch.key_suffix(bucket)
    try:
        with OpenNpz(path) as file:
            held = [keys for keys in arch.key_suffixes(bucket) if f"latents{keys}" in file.names] or [read_first]
            entries = []
            for keys in held:
                as_read = keys == read_first or (arch.multi_resolution and read_first not in held)
                entries.append(NpzEntry(path, keys, as_read, stale_reasons(file, keys)))
            return next((entry for entry in entries if not entry.reasons), entries[0])
    except (FileNotFoundError, BrokenNpzError) as error:
        return NpzEntry(path, read_first, True, [file_reason(error)])


def _parts(arch: Family, bucket: Size, fingerprint: Fingerprint) -> dict[str, tuple[int, ...]]:
    """The arrays that there must be for a bucket, and their shapes."""
    shape = arch.shape(bucket)
    wanted: dict[str, tuple[int, ...]] = {"latents": shape, "original_size": (2,), "crop_ltrb": (4,)}
    wanted |= {"latents_flipped": shape} if fingerprint.flip else {}
    return wanted | ({"alpha_mask": bucket[::-1]} if fingerprint.mask else {})


def _why_unfit(
    file: OpenNpz, keys: str, wanted: Mapping[str, tuple[int, ...]], original_size: Size
) -> StaleReason | None:
    if f"latents{keys}" not in file.names:
        return StaleReason(Stale.MISSING)
    for name, expected in wanted.items():
        if name + keys not in file.names:
            return StaleReason(Stale.PART, name + keys)
        shape = file.shape(name + keys)
        if shape != expected and (expected[0] or shape[-2:] != expected[-2:]):  # 0 channels: any number
            return StaleReason(Stale.SHAPE, name, list(shape), list(expected))
        if file.is_cut_off(name + keys):
            return StaleReason(Stale.CUT_OFF, name)
    width, height = (int(side) for side in file.numbers(f"original_size{keys}", 2))
    return None if (width, height) == original_size else StaleReason(Stale.IMAGE_SIZE, width, height, *original_size)


def made_from(file: OpenNpz, keys: str, image: Path) -> tuple[Fingerprint | None, list[StaleReason]]:
    """What the note of latents says that they were made from, and why that is not `image`.

    Latents without a note are believed, unless the image was changed or renamed since.

    Raises:
        UnreadableError: when the image was changed cannot be told now.
    """
    note = read_note(file, keys)
    if note is not None:
        fingerprint, source = note
        return fingerprint, [] if source in ("", image.name) else [StaleReason(Stale.OTHER_SOURCE, source)]
    with suppress(FileNotFoundError), reading(image):
        image.stat()
        return None, [StaleReason(Stale.OLDER)] if changed_since(str(image), file.path) else []
    return None, [StaleReason(Stale.GONE)]
