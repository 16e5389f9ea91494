"""Whether and where an npz holds what is to be trained: whole, of the right shape, from the image as it is now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from kohya_bucket.buckets.sizes import Size
from kohya_bucket.latents.fingerprint import Fingerprint, Stale, StaleReason, source_identity, why_stale
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.trainers.sdscripts.families import Family
from kohya_bucket.trainers.sdscripts.npz.names import further_path, usual_name
from kohya_bucket.trainers.sdscripts.npz.read_write import BrokenNpzError, OpenNpz, read_note, rekey


@dataclass(frozen=True)
class FoundNpz:
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


def find_npz(
    path: Path, wanted: StoreEntry, arch: Family, image: Path, *, ignoring: Collection[Stale] = ()
) -> FoundNpz:
    """Look for latents that serve for `wanted`: in `path`, whichever kind of keys they have, and in the file beside.

    The file beside is that of further sizes, or the usual one: which one a size is in depends on the version of
    sd-scripts and on the datasets of a run.

    They serve only if every byte of theirs is what was written: all are read, and compared with the checksums that a
    zip has. Latents without a note were made by sd-scripts itself: they serve if they are whole, their file is not
    older than the image, and the crop is in the middle. `ignoring` is as in `why_stale`; the type of the numbers never
    counts, npz hold float32.
    """
    fingerprint = wanted.fingerprint
    bucket = fingerprint.bucket_size
    parts = _parts(arch, bucket, fingerprint)

    def judge(file: OpenNpz, keys: str) -> list[StaleReason]:
        bad = _why_bad(file, keys, parts, wanted.original_size)
        if bad is not None:
            return [bad]
        known, reasons = made_from(file, keys, image)
        if known is not None:
            reasons = why_stale(known, fingerprint, image, ignoring=(Stale.DTYPE, *ignoring)) + reasons
        else:
            reasons = why_unknown(fingerprint) + ([] if Stale.SOURCE in ignoring else reasons)
        # last, since every byte is read
        damaged = None if reasons else file.damaged(name + keys for name in parts)
        return [StaleReason(Stale.CHECKSUM, damaged)] if damaged else reasons

    found = _look(path, bucket, arch, judge)
    if found.reasons:
        usual = usual_name(path.name)
        beside = _look(path.with_name(usual) if usual else further_path(path, bucket), bucket, arch, judge)
        if not beside.reasons:
            return FoundNpz(beside.path, beside.keys, False, [])
    return found


def why_unknown(wanted: Fingerprint) -> list[StaleReason]:
    """Why latents do not serve of which nothing but the image is known: sd-scripts' own crop is in the middle."""
    pairs = zip(wanted.resized_size, wanted.bucket_size, strict=True)
    middle = tuple((resized - bucket) // 2 for resized, bucket in pairs)
    return [] if wanted.crop == middle else [StaleReason(Stale.CROP, "not known", "{}x{}".format(*wanted.crop))]


def ensure_current(
    path: Path, wanted: StoreEntry, arch: Family, image: Path, *, ignoring: Collection[Stale] = ()
) -> tuple[list[StaleReason], bool]:
    """`find_npz`'s reasons; and where latents serve that this family's readers would not take, put them where they do.

    Returns the reasons, and whether a file was written. Raises `LatentStoreError` where it cannot be written.
    """
    found = find_npz(path, wanted, arch, image, ignoring=ignoring)
    if found.reasons or found.as_read:
        return found.reasons, False
    broken = rekey(found.path, found.keys, path, wanted.fingerprint.bucket_size, arch)
    return ([broken], False) if broken else ([], True)


def holds_npz(path: Path, bucket_size: Size, arch: Family) -> bool:
    """Whether there is anything of that size which this family's readers take, good or not."""

    def judge(file: OpenNpz, keys: str) -> list[StaleReason]:
        there = f"latents{keys}" in file.names and file.shape(f"latents{keys}") == arch.shape(bucket_size)
        return [] if there else [StaleReason(Stale.MISSING)]

    found = _look(path, bucket_size, arch, judge)
    return found.as_read and not found.reasons


def _look(path: Path, bucket: Size, arch: Family, judge: Callable[[OpenNpz, str], list[StaleReason]]) -> FoundNpz:
    """The latents in a file for which `judge` has no reasons; else those that there is most to say about."""
    own = arch.key_suffix(bucket)
    try:
        with OpenNpz(path) as file:
            there = [keys for keys in arch.key_suffixes(bucket) if f"latents{keys}" in file.names] or [own]
            looked = []
            for keys in there:
                as_read = keys == own or (arch.multi_resolution and own not in there)
                looked.append(FoundNpz(path, keys, as_read, judge(file, keys)))
            return next((found for found in looked if not found.reasons), looked[0])
    except FileNotFoundError:
        return FoundNpz(path, own, True, [StaleReason(Stale.MISSING)])
    except BrokenNpzError as error:
        return FoundNpz(path, own, True, [StaleReason(Stale.BROKEN, error or type(error).__name__)])


def _parts(arch: Family, bucket: Size, fingerprint: Fingerprint) -> dict[str, tuple[int, ...]]:
    """The arrays that there must be for a bucket, and their shapes."""
    shape = arch.shape(bucket)
    wanted: dict[str, tuple[int, ...]] = {"latents": shape, "original_size": (2,), "crop_ltrb": (4,)}
    wanted |= {"latents_flipped": shape} if fingerprint.flip else {}
    return wanted | ({"alpha_mask": bucket[::-1]} if fingerprint.mask else {})


def _why_bad(
    file: OpenNpz, keys: str, wanted: Mapping[str, tuple[int, ...]], original_size: Size
) -> StaleReason | None:
    if f"latents{keys}" not in file.names:
        return StaleReason(Stale.MISSING)
    for name, expected in wanted.items():
        if name + keys not in file.names:
            return StaleReason(Stale.PART, name + keys)
        found = file.shape(name + keys)
        if found != expected:
            return StaleReason(Stale.SHAPE, name, list(found), list(expected))
        if file.is_cut_off(name + keys):
            return StaleReason(Stale.CUT_OFF, name)
    width, height = (int(side) for side in file.numbers(f"original_size{keys}", 2))
    return None if (width, height) == original_size else StaleReason(Stale.IMAGE_SIZE, width, height, *original_size)


def made_from(file: OpenNpz, keys: str, image: Path) -> tuple[Fingerprint | None, list[StaleReason]]:
    """What the note of latents says that they were made from, and why that is not `image`.

    Latents without a note are believed, unless their file is older than the image.
    """
    known = read_note(file, keys)
    if known is not None:
        return known[0], [] if known[1] in ("", image.name) else [StaleReason(Stale.OTHER_SOURCE, known[1])]
    try:
        older = file.path.stat().st_mtime_ns < source_identity(image)[1]
    except OSError:
        return None, [StaleReason(Stale.GONE)]
    return None, [StaleReason(Stale.OLDER)] if older else []
