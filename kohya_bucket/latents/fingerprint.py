"""What makes a cached latent valid, and why one does not serve.

Two fingerprints differ exactly if the item must be encoded again. Reasons are one vocabulary for latents, outputs of
text encoders and npz: code decides by their kinds, and their words are for people.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kohya_bucket.images.resize import IMITATED
from kohya_bucket.images.stamps import hash_file

__all__ = [
    "UNKNOWN_VAE",
    "Fingerprint",
    "Reason",
    "Stale",
    "as_text",
    "module_hash",
    "sampled_hash",
    "source_identity",
    "why_stale",
]


class Stale(enum.Enum):
    """Kinds of reasons, for latents and outputs of text encoders. The values are what a reason's details go into."""

    MISSING = "not encoded yet"
    GONE = "the image is gone"

    # made from something else
    SOURCE = "the image changed ({})"
    OTHER_SOURCE = "it was made from {}"
    OLDER = "the image is newer than its cache, which does not say what it was made from"
    IMAGE_SIZE = "it is of an image of {}x{}, not {}x{}"
    VAE = "the VAE's weights changed ({} -> {})"
    BUCKET = "the bucket changed ({} -> {})"
    RESIZED = "the resized size changed ({} -> {})"
    CROP = "the crop changed ({} -> {})"
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


@dataclass(frozen=True, init=False)
class Reason:
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
        return self.kind.value.partition(" (")[0].format(*self.details)


def as_text(reasons: Iterable[Reason]) -> str:
    """All reasons in one line."""
    return "; ".join(map(str, reasons))


UNKNOWN_VAE = "unknown"  # in the place of a hash, where nobody knows


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


def why_stale(
    stored: Fingerprint, wanted: Fingerprint, source: Path | None = None, *, ignoring: Collection[Stale] = ()
) -> list[Reason]:
    """Reasons why what is stored does not serve for `wanted`; none if it does.

    A flipped latent or mask that is stored but not wanted is no reason. A file whose modification time alone
    changed is current if both content hashes are known and equal; with `source` given and a hash stored, the
    file is read to find out. `ignoring` names what may differ, e.g. `Stale.DTYPE`, or `Stale.SOURCE` for all that is
    known of the image file.
    """
    reasons = [] if Stale.SOURCE in ignoring else _why_source_changed(stored, wanted, source)
    for name, kind in _CHANGES.items():
        before, now = getattr(stored, name), getattr(wanted, name)
        if kind is Stale.INTERPOLATION:
            before, now = before.removesuffix(IMITATED), now.removesuffix(IMITATED)
        if kind not in ignoring and before != now:
            reasons.append(Reason(kind, _text(before), _text(now)))
    for kind, before, now in ((Stale.FLIP, stored.flip, wanted.flip), (Stale.MASK, stored.mask, wanted.mask)):
        if kind not in ignoring and now and not before:
            reasons.append(Reason(kind))
    return reasons


def _why_source_changed(stored: Fingerprint, wanted: Fingerprint, source: Path | None) -> list[Reason]:
    same_length = stored.source_bytes == wanted.source_bytes
    same_time = stored.source_mtime_ns == wanted.source_mtime_ns
    if source is not None and stored.source_hash and not wanted.source_hash and same_length and not same_time:
        wanted = replace(wanted, source_hash=hash_file(os.fspath(source)))
    if not same_length:
        return [Reason(Stale.SOURCE, f"{stored.source_bytes} -> {wanted.source_bytes} bytes")]
    if stored.source_hash and wanted.source_hash:
        same_content = stored.source_hash == wanted.source_hash
        return [] if same_content else [Reason(Stale.SOURCE, "its content hash differs")]
    return [] if same_time else [Reason(Stale.SOURCE, "its modification time differs")]


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
