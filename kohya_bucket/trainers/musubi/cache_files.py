"""A cache file: a whole safetensors file (`door/tensor_files.py`), whose header says what it was made from.

One of its texts is our note, which musubi-tuner does not read. It keeps texts that it does not know when it writes
outputs of text encoders again, so the note also says which content it belongs to.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kohya_bucket.checks import digest
from kohya_bucket.errors import LatentStoreError, as_damage, reading, why_not_written
from kohya_bucket.files import replacing
from kohya_bucket.inputs import open_input
from kohya_bucket.latents.fingerprint import NOTE, Fingerprint, Identity, Stale, StaleReason
from kohya_bucket.trainers.door.tensor_files import TEXTS, with_texts

_MOST = 1 << 24  # bytes of a header
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
          "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}  # fmt: skip
_FIRST = 4096  # bytes of the tensors that `content` is of


class BrokenFileError(LatentStoreError):
    """What lies there is no whole safetensors file."""


@dataclass(frozen=True)
class TensorFile:
    """What is in a whole file.

    Attributes:
        texts: by name.
        shapes: of each tensor, by its name.
        content: hash of the table of tensors and their first bytes: another one once the file is written
            anew and kept its texts.
    """

    texts: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    content: str


def read_tensor_file(path: Path) -> TensorFile:
    """What is in a file.

    Raises:
        BrokenFileError: it is cut off, or something else.
        FileNotFoundError: it is not there.
        UnreadableError: it cannot be read now.
    """
    with as_damage(path.name, error=BrokenFileError), reading(path), open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else _MOST
        if 8 + length > min(size, _MOST):
            raise BrokenFileError(f"{size} bytes, no whole header")
        table = json.loads(file.read(length))
        texts = table.pop(TEXTS, {})
        _check_tensors(table, 8 + length, size)
        shapes = {name: tuple(int(side) for side in spec["shape"]) for name, spec in table.items()}
        content = digest(json.dumps(table, sort_keys=True), file.read(_FIRST), size=16)
        return TensorFile({str(name): str(text) for name, text in texts.items()}, shapes, content)


def _check_tensors(table: dict[str, Any], begin: int, size: int) -> None:
    """Refuse tensors that do not lie one after the other from `begin` to the file's end, as the format demands."""
    at = 0
    for name, spec in sorted(table.items(), key=lambda item: list(item[1]["data_offsets"])):
        (start, end), shape, kind = spec["data_offsets"], spec["shape"], spec["dtype"]
        sound = kind in _BYTES and all(type(side) is int and side >= 0 for side in shape)
        if not sound or start != at or end - start != math.prod(shape) * _BYTES[kind]:
            raise BrokenFileError(f"{name!r} is {kind} {shape} in bytes {start} to {end}")
        at = end
    if begin + at != size:
        raise BrokenFileError(f"{size} bytes of {begin + at}")


def write_with_note(path: Path, write: Callable[[Path], object], note: Callable[[TensorFile], Note | None]) -> None:
    """What `write` makes of a path, as `path` with a note, whole or not at all.

    Raises:
        LatentStoreError: the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write(temporary)
            file = read_tensor_file(temporary)
            if said := note(file):
                temporary.write_bytes(with_texts(temporary.read_bytes(), said.as_text(file)))
    except OSError as error:
        raise LatentStoreError(f"cannot write {path}: {why_not_written(error)}") from error


Settings = dict[str, Any]
"""Keys of the dataset that decide what is encoded, besides those that decide the bucket."""

MadeBy = dict[str, str]
"""By option of the program that made it: its value, or the hash of the file or folder that it names."""

REPAIRED = "repaired"
"""Key in what made a text's outputs: an encoder that gave wrong ones in earlier versions gives right ones."""


@dataclass(frozen=True)
class Note:
    """What a cache was made from.

    Attributes:
        files: of latents the image or video itself, then further targets and control images, in order; of a caption's
            outputs, the images that the encoder saw with it. The caption itself musubi-tuner writes beside them.
        made_by: models and options.
        settings: of the dataset.
        clips: all that were made of the video, as (first frame, frames).
        fingerprint: of latents; None of a caption's outputs.
    """

    files: list[Identity] = field(default_factory=list)
    made_by: MadeBy = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    clips: list[tuple[int, int]] = field(default_factory=list)
    fingerprint: Fingerprint | None = None

    def as_text(self, file: TensorFile) -> dict[str, str]:
        """As it is written beside the tensors of `file`."""
        said: dict[str, Any] = {"seen": self.files}
        if self.fingerprint is not None:
            said = {"fingerprint": asdict(self.fingerprint), "further": self.files[1:]}
        said |= {"settings": self.settings, "clips": self.clips, "made_by": self.made_by, "content": file.content}
        return {NOTE: json.dumps(said)}

    @classmethod
    def in_file(cls, file: TensorFile, *, latents: bool) -> Note | None:
        """None where there is none, or where the tensors were written again since: then nothing is known."""
        with suppress(BrokenFileError), as_damage(NOTE, error=BrokenFileError):
            said = json.loads(file.texts.get(NOTE, "{}"))
            if said.get("content") != file.content:
                return None
            fingerprint = Fingerprint.from_json(said["fingerprint"]) if latents else None
            rest = [(int(nbytes), int(time), str(sha)) for nbytes, time, sha in said["further" if latents else "seen"]]
            return cls(
                rest if fingerprint is None else [fingerprint.source, *rest],
                {str(name): str(value) for name, value in said["made_by"].items()},
                dict(said["settings"] if latents else said.get("settings", {})),
                [(int(first), int(frames)) for first, frames in said.get("clips", [])],
                fingerprint,
            )
        return None


# They decide where and how fast something is made, or what is done besides.
_NO_MATTER = {
    "dataset_config", "device", "batch_size", "num_workers", "skip_existing", "skip_broken", "keep_cache", "debug_mode",
    "console_width", "console_back", "console_num_images", "disable_cudnn_backend", "disable_numpy_memmap",
    "vae_cache_cpu", "vae_chunk_size", "warn_on_caption_issues", "validate_caption_structure",
}  # fmt: skip
_ENCODERS = ("text_encoder", "t5", "clip", "byt5")
_SAMPLES, _SAMPLE = 64, 1 << 14


def made_by(arguments: Namespace | None) -> MadeBy:
    """What a program's arguments say of what it makes; empty where they are unknown.

    A model is known by its content, wherever it lies: its length and samples from all over it.
    """
    out = {}
    for name, value in sorted(vars(arguments).items()) if arguments is not None else ():
        if name not in _NO_MATTER:
            file = isinstance(value, (str, os.PathLike)) and value and os.path.exists(value)
            out[name] = _hash(os.path.abspath(value)) if file else json.dumps(value, default=str, sort_keys=True)
    return out


def why_made_otherwise(stored: MadeBy, wanted: MadeBy, *, text: bool) -> list[StaleReason]:
    """Reasons why what was made by `stored` does not serve; what either side leaves unsaid matches."""
    reasons = []
    for name in sorted(stored.keys() & wanted.keys()):
        before, now = stored[name], wanted[name]
        if before == now:
            continue
        if name == "vae":
            reasons.append(StaleReason(Stale.VAE, before[:8], now[:8]))
        elif text and name.startswith(_ENCODERS) and not name.endswith("dtype"):
            reasons.append(StaleReason(Stale.ENCODERS))
        else:
            reasons.append(StaleReason(Stale.OPTION, f"--{name}", before[:40], now[:40]))
    return list(dict.fromkeys(reasons))


@cache
def _hash(model: str) -> str:
    state = hashlib.blake2b(digest_size=16)
    files = [Path(model)]
    if os.path.isdir(model):
        files = sorted(file for file in files[0].rglob("*") if file.is_file() and not file.name.startswith("."))
    for file in files:
        size = file.stat().st_size
        state.update(f"{size}\0".encode())
        with open_input(file) as opened:
            for k in range(_SAMPLES if size > _SAMPLE else 1):
                opened.seek(k * max(0, size - _SAMPLE) // (_SAMPLES - 1))
                state.update(opened.read(_SAMPLE))
    return state.hexdigest()
