"""What makes a cached latent valid, and why one does not serve.

Two fingerprints differ exactly if the item must be encoded again. That is decided in one place, `differences` and
`source_changes`, for one item or for columns of them. Reasons are one vocabulary for latents, outputs of text encoders
and npz: code decides by their kinds, and their words are for people.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, UnreadableError, reading
from kohya_bucket.images.resize import IMITATED
from kohya_bucket.images.stamps import hash_file


class Stale(enum.Enum):
    """Kinds of reasons, for latents and outputs of text encoders. The values are what a reason's details go into."""

    MISSING = "not encoded yet"
    GONE = "the image is gone"

    # made from something else
    SOURCE = "the image changed ({})"
    OTHER_SOURCE = "it was made from {}"
    OLDER = "the image is newer than its cache, which does not say what it was made from"
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

    @property
    def brief(self) -> str:
        """The text without what is in brackets."""
        return self.value.partition(" (")[0]


@dataclass(frozen=True, init=False)
class StaleReason:
    """One reason, with what its text names."""

    kind: Stale
    details: tuple[Any, ...]

    def __init__(self, kind: Stale, *details: Any) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "details", details)

    def __str__(self) -> str:
        return self.kind.value.format(*self.details)

    @property
    def brief(self) -> str:
        """The text without what is in brackets."""
        return self.kind.brief.format(*self.details)


def as_text(reasons: Iterable[StaleReason]) -> str:
    """All reasons in one line."""
    return "; ".join(map(str, reasons))


NOTE = "kohya_bucket_fingerprint"
"""What a fingerprint is called where it is noted in a file of a trainer's form."""

UNKNOWN_VAE = "unknown"  # used when the VAE's hash is unknown


@dataclass(frozen=True)
class Fingerprint:
    """Everything a latent depends on.

    Attributes:
        source_bytes: length of the image file.
        source_mtime_ns: its modification time.
        source_hash: hash of its content (hex), or "" where none was asked for.
        vae: hash of the VAE's weights (hex).
        bucket_size, resized_size: (width, height) in pixels.
        crop: left and top of the cut in the resized image.
        interpolation: filter and the library that computes it, e.g. "area/cv2"; "none" without resizing. What imitates
            a library to 1 of 255, as in "area/cv2-stub", serves like it.
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

    @classmethod
    def of(cls, stated: dict[str, Any]) -> Fingerprint:
        """The same of `asdict`, from a file that anybody may have changed.

        Raises:
            ValueError, TypeError, KeyError, UnicodeEncodeError: a value is missing, or not of its type.
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
    """What of stored items is not as wanted, besides their source: [N] bool by kind, or one bool for one item.

    A flipped latent or mask that is stored but not wanted makes no difference. `ignoring` names what may differ.
    Outputs of text encoders depend on caption, encoders and tokens; "" is unknown, which matches anything.
    """
    if wanted["kind"] == "text":
        names = [name for name in _CHANGES_OF_TEXT if wanted.get(name)]
        return {_CHANGES_OF_TEXT[n]: np.asarray((stored[n] != wanted[n]) & (stored[n] != "")) for n in names}
    found = {kind: _unequal(stored[name], wanted[name]) for name, kind in _CHANGES.items() if kind not in ignoring}
    if Stale.CROP in found:  # it follows from the sizes; where it alone differs, a focus moved it
        sizes = [_unequal(stored[name], wanted[name]) for name in ("bucket_size", "resized_size")]
        found[Stale.CROP] = np.asarray(found[Stale.CROP] & ~np.logical_or(*sizes))
    if Stale.INTERPOLATION in found:
        before, now = (_not_imitated(columns["interpolation"]) for columns in (stored, wanted))
        found[Stale.INTERPOLATION] = _unequal(before, now)
    for kind, name in ((Stale.FLIP, "flip"), (Stale.MASK, "mask")):
        if kind not in ignoring:
            found[kind] = np.asarray(wanted[name] & np.logical_not(stored[name]))
    return found


def _unequal(before: Any, now: Any) -> Bools:
    out = np.asarray(before != now)
    return np.asarray(out.any(axis=-1) if out.ndim > 1 else out)


def _not_imitated(names: Any) -> Any:
    if isinstance(names, str):
        return names.removesuffix(IMITATED)
    return np.array([name.removesuffix(IMITATED) for name in names], dtype=object)


_LENGTH, _CONTENT, _TIME = 1, 2, 3  # of `source_changes`


def source_changes(
    stored: Columns, wanted: Columns, hash_of: Callable[[int], str], *, inside: Bools | bool = False,
    always: bool = False,
) -> npt.NDArray[np.uint8]:  # fmt: skip
    """[N] how each image is not what was encoded: 0, it is; or its length, its content, or its time alone differs.

    Where a hash is stored, contents are compared if only the time differs, or `always`; then the time does not count.

    Args:
        stored, wanted: `source_bytes` and `source_mtime_ns`, [N] each; of what is stored also `source_hash`, N texts.
        hash_of: the hash of an image as it is now, which may be read for it; "" where it is not known, so that length
            and time decide.
        inside: [N] or one for all, images that lie in a file with others, so that its length alone decides nothing.
    """
    length = np.asarray(stored["source_bytes"] != wanted["source_bytes"])
    time = np.asarray(stored["source_mtime_ns"] != wanted["source_mtime_ns"])
    out = np.where(length, _LENGTH, np.where(time, _TIME, 0)).astype(np.uint8)
    for k in np.flatnonzero((inside | ~length) & (length | time | always)).tolist():
        before = str(stored["source_hash"][k])
        if before:
            try:
                now = hash_of(k)
            except UnreadableError:
                raise
            except (OSError, KohyaBucketError):
                out[k] = _CONTENT
                continue
            if now:
                out[k] = 0 if now == before else _CONTENT
    return out


def why_stale(
    stored: Fingerprint, wanted: Fingerprint, source: Path | None = None, *, ignoring: Collection[Stale] = ()
) -> list[StaleReason]:
    """Reasons why what is stored does not serve for `wanted`; none if it does. See `differences`.

    A file whose modification time alone changed is current if both content hashes are known and equal; with `source`
    given and a hash stored, the file is read to find out. `ignoring` may name `Stale.SOURCE` for all that is known of
    the image file.
    """
    different = why_different(vars(stored), vars(wanted), ignoring=ignoring)
    if Stale.SOURCE in ignoring or wanted.kind == "text":
        return different
    names = ("source_bytes", "source_mtime_ns", "source_hash")
    before, now = ({name: np.array([getattr(known, name)]) for name in names} for known in (stored, wanted))

    def hash_of(_: int) -> str:
        if wanted.source_hash or source is None:
            return wanted.source_hash
        with reading(source):
            return hash_file(os.fspath(source))

    (change,) = source_changes(before, now, hash_of, always=bool(wanted.source_hash)).tolist()
    texts = {
        _LENGTH: f"{stored.source_bytes} -> {wanted.source_bytes} bytes",
        _CONTENT: "its content hash differs",
        _TIME: "its modification time differs",
    }
    return [StaleReason(Stale.SOURCE, texts[change]), *different] if change else different


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


def source_identity(path: str | os.PathLike[str], *, content: bool = False) -> tuple[int, int, str]:
    """Length in bytes, modification time in ns and, with `content`, the hash of the file (else "")."""
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns, hash_file(os.fspath(path)) if content else ""


_SAMPLES = 1024


def sampled_hash(module: Any) -> str:
    """Hash of at most 1024 values of each of a torch module's weights, 16 bytes as hex; "" for what has no weights.

    For modules of many gigabytes: training, merging and another precision change nearly all values of a tensor.
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
    """Hash of a torch module's weights, 16 bytes as hex: the same for one model wherever its weights are met.

    A trainer names weights otherwise than the file does, has them on another device and in another type. So names do
    not count, nor axes of length 1 (attention as convolution or as matrix), and values count as bfloat16, which
    float32 and bfloat16 weights of one model agree in. Weights that were rounded to float16 in between may not.
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
