"""What a cache file says of what it was made from: one more text in its header, which musubi-tuner does not read.

musubi-tuner carries texts that it does not know over when it writes outputs of text encoders anew, so the addition also
says which content it belongs to.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from kohya_bucket.errors import as_damage
from kohya_bucket.latents.fingerprint import Fingerprint
from kohya_bucket.latents.npz.note import NOTE
from kohya_bucket.musubi.caching.made_by import MadeBy
from kohya_bucket.musubi.caching.sources import Identity
from kohya_bucket.musubi.caching.tensor_file import BrokenFileError, TensorFile

__all__ = ["REPAIRED", "LatentsNote", "TextNote", "read_latents_note", "read_text_note", "texts_of"]

REPAIRED = "repaired"
"""Key in what made a text's outputs: an encoder that gave wrong ones in earlier versions gives right ones."""
Settings = dict[str, Any]
"""Keys of the data set that decide what is encoded, besides those that decide the bucket."""


@dataclass(frozen=True)
class LatentsNote:
    """What latents were made from.

    Attributes:
        fingerprint: of the image or video itself.
        further: of further targets and control images, in order.
        settings: of the data set.
        clips: all that were made of the video, as (first frame, frames).
        made_by: models and options.
    """

    fingerprint: Fingerprint
    further: list[Identity] = field(default_factory=list)
    settings: Settings = field(default_factory=dict)
    clips: list[tuple[int, int]] = field(default_factory=list)
    made_by: MadeBy = field(default_factory=dict)


@dataclass(frozen=True)
class TextNote:
    """What outputs of text encoders were made from besides the caption, which musubi-tuner writes beside them.

    Attributes:
        seen: the images that the encoder saw with the caption, in order.
        made_by: models and options.
        settings: of the data set, where the encoder saw images.
        clips: all of the video that have outputs, where each has its own.
    """

    seen: list[Identity] = field(default_factory=list)
    made_by: MadeBy = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    clips: list[tuple[int, int]] = field(default_factory=list)


def texts_of(note: LatentsNote | TextNote, file: TensorFile) -> dict[str, str]:
    """The text to write beside the tensors of `file`."""
    return {NOTE: json.dumps(asdict(note) | {"content": file.content})}


def read_latents_note(file: TensorFile) -> LatentsNote | None:
    """None where there is none, or where somebody has written the tensors anew since: then nothing is known."""
    with suppress(BrokenFileError), as_damage(NOTE, error=BrokenFileError):
        said = _said(file)
        if said is not None:
            return LatentsNote(
                Fingerprint.of(said["fingerprint"]),
                [_identity(one) for one in said["further"]],
                dict(said["settings"]),
                _clips(said),
                _made_by(said),
            )
    return None


def read_text_note(file: TensorFile) -> TextNote | None:
    """As `read_latents_note`."""
    with suppress(BrokenFileError), as_damage(NOTE, error=BrokenFileError):
        said = _said(file)
        if said is not None:
            seen = [_identity(one) for one in said["seen"]]
            return TextNote(seen, _made_by(said), dict(said.get("settings", {})), _clips(said))
    return None


def _said(file: TensorFile) -> dict[str, Any] | None:
    said = json.loads(file.texts.get(NOTE, "{}"))
    return said if said.get("content") == file.content else None


def _identity(one: Any) -> Identity:
    nbytes, mtime, content = one
    return int(nbytes), int(mtime), str(content)


def _clips(said: dict[str, Any]) -> list[tuple[int, int]]:
    return [(int(first), int(frames)) for first, frames in said.get("clips", [])]


def _made_by(said: dict[str, Any]) -> MadeBy:
    return {str(name): str(value) for name, value in said["made_by"].items()}
