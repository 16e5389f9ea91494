"""What makes a cached latent valid, and why one is stale.

An item is encoded again exactly where its fingerprint differs. One place decides that, `differences` and, for the
image, `source_changes`: for a single item or for columns of many. Latents, text-encoder outputs and npz share one
vocabulary of reasons: code decides by their kind, their text is for people.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, may_pass, reading
from kohya_bucket.images.resize import IMITATED
from kohya_bucket.images.stamps import Stamp, hash_file


class Stale(enum.Enum):
    """Kinds of reasons, for latents and text-encoder outputs. The values are templates for a reason's details."""

    MISSING = "not encoded yet"
    GONE = "the image is gone"

    # made from something else
    SOURCE = "the image changed ({})"
    OTHER_SOURCE = "it was made from {}"
    OLDER = "the image or its name is newer than its cache, which does not say what it was made from"
    IMAGE_SIZE = "the image changed ({}x{} then, {}x{} now)"
    VAE = "the VAE's weights changed ({} -> {})"
    BUCKET = "the bucket changed ({} -> {})"
    RESIZED = "the resized size changed ({} -> {})"
    CROP = "its focus moved (the crop {} -> {})"
    FOCUS = "its focus moved ({} -> {})"
    INTERPOLATION = "the interpolation changed ({} -> {})"
    DTYPE = "the dtype changed ({} -> {})"
    KIND = "the kind changed ({} -> {})"
    CLIP = "the config does not ask for {} frames from {} on"
    OPTION = "{} changed ({} -> {})"
    FLIP = "the flipped latent is missing"
    MASK = "the alpha mask is missing"
    CAPTION = "the caption changed"
    ENCODERS = "the text encoders changed"
    TOKENS = "how captions are encoded changed ({} -> {})"
    DROPOUT = "the caption_dropout_rate changed ({:g} -> {:g})"

    # the file
    BROKEN = "it is broken ({})"
    CUT_OFF = "its {} is cut off"
    CHECKSUM = "the checksum of {} is wrong"
    PART = "it has no {}"
    SHAPE = "its {} has shape {}, not {}"
    NOT_FINITE = "its {} is not finite (NaN or infinity)"

    @property
    def brief(self) -> str:
        """The text without its brackets."""
        return self.value.partition(" (")[0]


@dataclass(frozen=True, init=False)
class StaleReason:
    """One reason, with the details that its text names."""

    kind: Stale
    details: tuple[Any, ...]

    def __init__(self, kind: Stale, *details: Any) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "details", details)

    def __str__(self) -> str:
        return self.kind.value.format(*self.details)

    @property
    def brief(self) -> str:
        """The text without its brackets."""
        return self.kind.brief.format(*self.details)


def as_text(reasons: Iterable[StaleReason]) -> str:
    """All reasons in one line."""
    return "; ".join(map(str, reasons))


Identity = tuple[int, int, str]
"""What a file is known by: bytes, modification time in ns, and hash of its content ("" where it is not asked for)."""

NOTE = "kohya_bucket_fingerprint"
"""The key of a fingerprint in a trainer's own cache files."""

UNKNOWN_VAE = "unknown"  # used when the VAE's hash is unknown


@dataclass(frozen=True)
class Fingerprint:
    """Everything a latent depends on.

    Attributes:
        source_bytes: length of the image file.
        source_mtime_ns: its modification time.
        source_hash: hash of its content (hex); "" if none was requested.
        vae: hash of the VAE's weights (hex).
        bucket_size, resized_size: (width, height) in pixels.
        crop: left and top of the cut in the resized image.
        interpolation: filter and the library that computes it, e.g. "area/cv2"; "none" without resizing. An imitation
            that agrees to 1 of 255, as in "area/cv2-stub", counts as equal.
        dtype: storage type, "float32", "float16" or "bfloat16".
        kind: "latents", or "posterior" (mean and standard deviation, sampled when read).
        flip: the mirrored image is stored too.
        mask: the alpha channel is stored too.
    """

    source_bytes: int
    source_mtime_ns: int
    source_hash: str
    vae: str
    bucket_size: tuple[int, int]
    resized_size: tuple[int, int]
    crop: tuple[int, int]
    interpolation: str
    dtype: str
    kind: str = "latents"
    flip: bool = False
    mask: bool = False

    @property
    def source(self) -> Identity:
        """What the image file was known by."""
        return self.source_bytes, self.source_mtime_ns, self.source_hash

    @classmethod
    def from_json(cls, stated: dict[str, Any]) -> Fingerprint:
        """The inverse of `asdict`, for a file that anybody may have changed.

        Raises:
            ValueError, TypeError, KeyError, UnicodeEncodeError: a value is missing or has the wrong type.
        """
        pairs = {name: tuple(stated[name]) for name in ("bucket_size", "resized_size", "crop")}
        made = cls(**(stated | pairs))
        numbers = (made.source_bytes, made.source_mtime_ns)
        texts = (made.source_hash, made.vae, made.interpolation, made.dtype, made.kind)
        if not all(type(n) is int and abs(n) < 1 << 63 for n in numbers) or not all(type(t) is str for t in texts):
            raise ValueError(f"{numbers}, {texts}")
        if made.kind not in ("latents", "posterior") or "\0" in "".join(texts):
            raise ValueError(f"{texts}")
        "".join(texts).encode("utf-8")
        sides = [side for pair in pairs.values() for side in pair]
        if len(sides) != 6 or not all(type(side) is int and abs(side) < 1 << 31 for side in sides):
            raise ValueError(f"sides of {sides} pixels")
        if min(*made.bucket_size, *made.resized_size) < 1 or type(made.flip) is not bool or type(made.mask) is not bool:
            raise ValueError(f"sides of {sides} pixels, flip {made.flip!r}, mask {made.mask!r}")
        return made


_CHANGES = {
    "vae": Stale.VAE,
    "bucket_size": Stale.BUCKET,
    "resized_size": Stale.RESIZED,
    "crop": Stale.CROP,
    "interpolation": Stale.INTERPOLATION,
    "dtype": Stale.DTYPE,
    "kind": Stale.KIND,
}
_CHANGES_OF_TEXT = {"source_hash": Stale.CAPTION, "vae": Stale.ENCODERS, "interpolation": Stale.TOKENS}
_COLUMNS = {kind: name for changes in (_CHANGES, _CHANGES_OF_TEXT) for name, kind in changes.items()}

Columns = Mapping[str, Any]  # by the names of `Fingerprint`'s fields: of one item, or arrays of N, pairs as [N, 2]
Bools = npt.NDArray[np.bool_]


def differences(stored: Columns, wanted: Columns, *, ignoring: Collection[Stale] = ()) -> dict[Stale, Bools]:
    """How stored items differ from the wanted ones apart from their source: [N] bool by kind, or one bool for one item.

    An extra flipped latent or mask is no difference. `ignoring` names what may differ.
    Text-encoder outputs depend on caption, encoders and tokens; "" is unknown and matches anything.
    """
    if wanted["kind"] == "text":
        names = [name for name in _CHANGES_OF_TEXT if wanted.get(name)]
        return {_CHANGES_OF_TEXT[n]: np.asarray((stored[n] != wanted[n]) & (stored[n] != "")) for n in names}
    differs = {kind: _unequal(stored[name], wanted[name]) for name, kind in _CHANGES.items() if kind not in ignoring}
    # The crop follows from the sizes: it is a reason of its own only where a focus moved it.
    if Stale.CROP in differs:
        sizes = [_unequal(stored[name], wanted[name]) for name in ("bucket_size", "resized_size")]
        differs[Stale.CROP] = np.asarray(differs[Stale.CROP] & ~np.logical_or(*sizes))
    if Stale.INTERPOLATION in differs:
        filters = (_not_imitated(columns["interpolation"]) for columns in (stored, wanted))
        differs[Stale.INTERPOLATION] = _unequal(*filters)
    for kind, name in ((Stale.FLIP, "flip"), (Stale.MASK, "mask")):
        if kind not in ignoring:
            differs[kind] = np.asarray(wanted[name] & np.logical_not(stored[name]))
    return differs


def _unequal(stored: Any, wanted: Any) -> Bools:
    differs = np.asarray(stored != wanted)
    return np.asarray(differs.any(axis=-1) if differs.ndim > 1 else differs)


def _not_imitated(names: Any) -> Any:
    if isinstance(names, str):
        return names.removesuffix(IMITATED)
    return np.array([name.removesuffix(IMITATED) for name in names], dtype=object)


_LENGTH, _CONTENT, _TIME = 1, 2, 3  # of `source_changes`


def source_changes(
    stored: Columns,
    wanted: Columns,
    hash_of: Callable[[int], str],
    *,
    inside: Bools | bool = False,
    always: Bools | bool = False,
) -> npt.NDArray[np.uint8]:
    """[N] how each image differs from the one that was encoded: 0, not at all; else in length, content, or time alone.

    Where a hash is stored, contents are compared if only the time differs, or `always`; then the time does not count.

    Args:
        stored, wanted: `source_bytes` and `source_mtime_ns`, [N] each; `stored` also has `source_hash`, N texts.
        hash_of: the image's current hash, which may read the file; "" if unknown: then length and time decide.
        inside: [N] or one for all, images in a file with others, whose length alone decides nothing.
    """
    length = np.asarray(stored["source_bytes"] != wanted["source_bytes"])
    time = np.asarray(stored["source_mtime_ns"] != wanted["source_mtime_ns"])
    out = np.where(length, _LENGTH, np.where(time, _TIME, 0)).astype(np.uint8)
    # Only a hash can clear an image whose stamp differs; a file of another length needs none, it has changed.
    for k in np.flatnonzero((inside | ~length) & (length | time | always)).tolist():
        stored_hash = str(stored["source_hash"][k])
        if stored_hash:
            try:
                current_hash = hash_of(k)
            except (OSError, KohyaBucketError) as error:
                if may_pass(error):  # it may be the same image
                    raise
                out[k] = _CONTENT  # gone, or damaged
                continue
            if current_hash:
                out[k] = 0 if current_hash == stored_hash else _CONTENT
    return out


def stamps_shared(nbytes: npt.NDArray[np.int64], mtimes: npt.NDArray[np.int64]) -> Bools:
    """[N] of N files, whether another one has its length and time too: they do not tell these two apart."""
    mixed = nbytes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + mtimes.astype(np.uint64)
    ordered = np.sort(mixed)
    return np.isin(mixed, ordered[1:][ordered[1:] == ordered[:-1]]) & (nbytes >= 0)


def why_stale(
    stored: Fingerprint, wanted: Fingerprint, source: Path | None = None, *, ignoring: Collection[Stale] = ()
) -> list[StaleReason]:
    """Why what is stored cannot be used for `wanted`; empty if it can. See `differences`.

    A file of which only the modification time changed is current if both content hashes are known and equal; with
    `source` and a stored hash, the file is read to find out. `Stale.SOURCE` in `ignoring` stands for everything about
    the image file.
    """
    different = why_different(vars(stored), vars(wanted), ignoring=ignoring)
    if Stale.SOURCE in ignoring or wanted.kind == "text":
        return different
    return why_other_source(stored.source, wanted.source, source) + different


def why_different(stored: Columns, wanted: Columns, *, ignoring: Collection[Stale] = ()) -> list[StaleReason]:
    """`differences` of one item as reasons."""
    reasons = []
    for kind in (kind for kind, differs in differences(stored, wanted, ignoring=ignoring).items() if differs):
        name = _COLUMNS[kind] if "{" in kind.value else None
        pair = () if name is None else (_text(stored[name]), _text(wanted[name]))
        reasons.append(StaleReason(kind, *(text.removesuffix(IMITATED) for text in pair)))
    return reasons


def _text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def source_identity(path: str | os.PathLike[str], *, content: bool = False) -> Identity:
    """What a file is known by: take it before the file is read for what is made of it."""
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns, hash_file(os.fspath(path)) if content else ""


GONE: Stamp = (-1, -1)


def source_now(image: str | os.PathLike[str]) -> Stamp:
    """Length and time of an image, asked for before it is read; `GONE` where there is none, or it cannot be told."""
    try:
        return source_identity(image)[:2]
    except OSError:
        return GONE


def changed_since(path: str, cache: str | os.PathLike[str]) -> bool:
    """Whether what a path leads to may be another file than when a cache was written that says nothing of it.

    A file that is renamed, or put back with its old time, was changed then: by its inode, or on Windows by when it was
    made, where names that are exchanged are not noticed. One that is gone was not.
    """
    with reading(cache):
        made = os.stat(cache).st_mtime_ns
    with suppress(FileNotFoundError), reading(path):
        stat = os.stat(path)
        return max(stat.st_mtime_ns, stat.st_ctime_ns) > made
    return False


def stamp_is_shared(path: str | os.PathLike[str], occasion: Hashable = None) -> bool:
    """Whether another file in its folder has its length and time too, which then do not tell the two apart.

    A folder is looked through again once it was changed; by who writes into it himself, once on each `occasion`.
    """
    stat, folder = os.stat(path), os.path.dirname(os.path.abspath(path))
    since = os.stat(folder).st_mtime_ns if occasion is None else occasion
    return (stat.st_size, stat.st_mtime_ns) in _shared_stamps(folder, since)


@lru_cache(maxsize=1 << 12)
def _shared_stamps(folder: str, _since: Hashable) -> frozenset[Stamp]:
    """Of the files in a folder, those stamps that several have."""
    stamps = np.fromiter(chain.from_iterable(_stamps_in(folder)), np.int64).reshape(-1, 2)
    return frozenset(map(tuple, stamps[stamps_shared(*stamps.T)].tolist()))


def _stamps_in(folder: str) -> Iterator[Stamp]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it has gone meanwhile
                if entry.is_file():
                    stat = entry.stat()
                    yield stat.st_size, stat.st_mtime_ns


def why_other_source(stored: Identity, now: Identity, path: Path | None) -> list[StaleReason]:
    """Why a file is not the one that something was made from; `path` is read where only its hash can tell."""
    names = ("source_bytes", "source_mtime_ns", "source_hash")
    then, file = ({name: np.array([value]) for name, value in zip(names, one, strict=True)} for one in (stored, now))

    def hash_of(_: int) -> str:
        if now[2] or path is None:
            return now[2]
        with reading(path):
            return hash_file(os.fspath(path))

    (change,) = source_changes(then, file, hash_of, always=bool(now[2])).tolist()
    texts = {
        _LENGTH: f"{stored[0]} -> {now[0]} bytes",
        _CONTENT: "its content hash differs",
        _TIME: "its modification time differs",
    }
    return [StaleReason(Stale.SOURCE, texts[change])] if change else []


_SAMPLES = 1024


def sampled_hash(module: Any) -> str:
    """Hash of at most 1024 values of each of a torch module's weights, 16 bytes as hex; "" if it has none.

    For modules of many gigabytes: training, merging or another precision changes nearly all values of a tensor.
    """
    import torch

    digests = []
    for name, tensor in module.state_dict().items() if hasattr(module, "state_dict") else ():
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            values = tensor.detach().reshape(-1)
            values = values[:: max(1, len(values) // _SAMPLES)][:_SAMPLES].float().cpu().contiguous()
            digests.append(f"{name} {list(tensor.shape)} {hashlib.blake2b(values.numpy().data).hexdigest()}")
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest() if digests else ""


def module_hash(module: Any) -> str:
    """Hash of a torch module's weights, 16 bytes as hex: the same for one model however its weights are loaded.

    A trainer may rename the weights of a file, move them to another device and convert them. So names do not count,
    nor do axes of length 1 (attention as convolution or as matrix), and values count as bfloat16, in which the float32
    and bfloat16 weights of a model agree. Weights rounded to float16 in between may not.
    """
    import torch

    digests = []
    for tensor in module.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            values = tensor.detach()
            values = values.to(torch.bfloat16) if values.is_floating_point() else values
            bits = values.to("cpu").contiguous().reshape(-1).view(torch.uint8)
            shape = [side for side in tensor.shape if side != 1]
            digests.append(hashlib.blake2b(bits.numpy().data, digest_size=16).hexdigest() + f" {shape}")
    return hashlib.blake2b("\n".join(sorted(digests)).encode(), digest_size=16).hexdigest()
