"""What an npz says of its latents: one more array, which sd-scripts does not know.

Its readers ask for arrays by name and so ignore the addition, and its writer carries unknown arrays over, so the
addition also says which latents it belongs to.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import as_damage
from kohya_bucket.latents.architectures import Architecture
from kohya_bucket.latents.fingerprint import Fingerprint
from kohya_bucket.latents.npz.opened import BROKEN, BrokenNpzError, OpenNpz, member_crc

__all__ = ["NOTE", "note_of", "read_note", "stored_fingerprint"]

NOTE = "kohya_bucket_fingerprint"
_MOST = 1 << 16  # bytes


def note_of(fingerprint: Fingerprint, source_name: str, latents: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The array to write beside `latents`: what they were made from, and the file name of the image."""
    note = vars(fingerprint) | {"source": source_name, "latents_crc32": member_crc(latents)}
    return np.frombuffer(json.dumps(note).encode("utf-8"), dtype=np.uint8)


def read_note(file: OpenNpz, key_suffix: str) -> tuple[Fingerprint, str] | None:
    """Fingerprint and file name of the image of the latents whose keys end so.

    None where there is none, or where sd-scripts has rewritten the latents since: then nothing is known.
    """
    name = f"{NOTE}{key_suffix}"
    if name not in file.names:
        return None
    with suppress(BrokenNpzError), as_damage(name, error=BrokenNpzError):
        shape = file.shape(name)
        note = json.loads(file.array(name).tobytes()) if len(shape) == 1 and shape[0] <= _MOST else {}
        if note.pop("latents_crc32") == file.crc(f"latents{key_suffix}"):
            source = note.pop("source")
            if isinstance(source, str):
                return Fingerprint.of(note), source
    return None


def stored_fingerprint(path: Path, bucket_size: tuple[int, int], arch: Architecture) -> tuple[Fingerprint, str] | None:
    """`read_note` of the latents that `read_npz` reads; None too where there are none."""
    with suppress(*BROKEN), OpenNpz(path) as file:
        for keys in arch.key_suffixes(bucket_size):
            if f"latents{keys}" in file.names and file.shape(f"latents{keys}") == arch.shape(bucket_size):
                return read_note(file, keys)
    return None
