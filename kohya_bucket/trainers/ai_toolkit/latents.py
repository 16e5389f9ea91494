"""Which cached latents and text embeddings of ai-toolkit are still those of their files.

Its names hold how an image is cut, or a caption, and nothing of what an image shows: the latents of an image that was
edited, or that has another's name now, would be trained on, and so would a file that was cut off or changed. Such
latents get another name, under which ai-toolkit makes them again; no file of an earlier run is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kohya_bucket.errors import reading
from kohya_bucket.files import write_file
from kohya_bucket.inputs import open_input
from kohya_bucket.latents.fingerprint import (
    NOTE,
    Identity,
    Stale,
    StaleReason,
    source_identity,
    stamp_is_shared,
    why_other_source,
)
from kohya_bucket.latents.finite import first_not_finite
from kohya_bucket.trainers.door.tensor_files import TEXTS, not_finite, parts_of, with_texts

_MADE_FROM = "_kohya_bucket_made_from"
"""Attribute of an item: by the name of each file that is to be made, what the files it is made from were before."""
_ANEW = "_kohya_bucket_anew"
"""Attribute of an item: what was there did not serve, and it gets other files."""
_BAD = "_kohya_bucket_bad"
"""Attribute of an item: why it is not trained."""
IN_MEMORY = ("_encoded_latent", "_cached_first_frame_latent", "_cached_audio_latent")
"""Attributes of an item with the latents that are kept in memory."""


def name_to_use(item: Any, path: str, files: Sequence[str]) -> str:
    """`path`, or the first name like it under which nothing lies, or what was made from these files as they are.

    What is made from files and does not say from which, as ai-toolkit writes it, may be of others: it is not used.

    Raises:
        UnreadableError: something cannot be read now.
    """
    (stem, ending), name, n = os.path.splitext(path), path, 0
    while _is_there(name) and not _serves(name, files):
        n += 1
        name = f"{stem}_anew{n}{ending}"
    if not _is_there(name):
        with suppress(FileNotFoundError):  # of an image: ai-toolkit says so when it reads it
            vars(item).setdefault(_MADE_FROM, {})[name] = [_identity(file) for file in files]
        if n:
            setattr(item, _ANEW, True)
    return name


def _is_there(path: str) -> bool:
    with suppress(FileNotFoundError), reading(path):
        os.stat(path)
        return True
    return False


def _serves(path: str, files: Sequence[str]) -> bool:
    """Whether a file is whole, finite, and made from these as they are; one of these that is gone counts as it was."""
    try:
        with reading(path), safe_open(path, framework="np") as file:
            stated = (file.metadata() or {}).get(NOTE)
    except SafetensorError:
        return False  # cut off
    if stated is None and files:
        return False
    content = _content(path)
    if stated is not None:
        try:
            note = json.loads(stated)
            made_from = [(int(nbytes), int(time), str(sha)) for nbytes, time, sha in note["made_from"]]
            same = note["digest"] == _digest(content) and len(made_from) == len(files)
        except (ValueError, TypeError, KeyError):
            return False
        if not same or any(_changed(file, then) for file, then in zip(files, made_from, strict=True)):
            return False
    return not not_finite(BytesIO(content))


def note_made(item: Any) -> None:
    """Let the files that were just made for an item say what they hold, and of what they are.

    What is not finite is removed, and its item marked as bad, as it is with latents in memory.

    Raises:
        LatentStoreError: the disk refuses.
        UnreadableError: a file cannot be read now.
    """
    made_from: dict[str, list[Identity]] = vars(item).setdefault(_MADE_FROM, {})
    for path in list(made_from):
        with suppress(FileNotFoundError):
            content = _content(path)
            files = made_from.pop(path)
            if name := not_finite(BytesIO(content)):
                os.remove(path)
                setattr(item, _BAD, str(StaleReason(Stale.NOT_FINITE, name)))
                continue
            note = json.dumps({"digest": _digest(content), "made_from": files})
            write_file(Path(path), [with_texts(content, {NOTE: note})], sync=False)
    kept = [(name, getattr(item, name, None)) for name in IN_MEMORY]
    if first_not_finite((name, tensor) for name, tensor in kept if tensor is not None):
        setattr(item, _BAD, str(StaleReason(Stale.NOT_FINITE, "latent")))


def why_bad(item: Any) -> str:
    """Why an item is not trained; an empty text where it is."""
    return str(getattr(item, _BAD, ""))


def _content(path: str) -> bytes:
    with reading(path), open_input(path) as file:
        return file.read()


def _digest(content: bytes) -> str:
    """Of the tensors in a whole file, and of what the header says of them."""
    table, tensors = parts_of(content)
    table.pop(TEXTS, None)
    digest = hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16)
    digest.update(tensors)
    return digest.hexdigest()


def _identity(file: str) -> Identity:
    with reading(file):
        return source_identity(file, content=True)


def _changed(file: str, then: Identity) -> bool:
    with suppress(FileNotFoundError), reading(file):
        now = source_identity(file, content=stamp_is_shared(file))
        return bool(why_other_source(then, now, Path(file)))
    return False


def made_anew(items: Iterable[Any]) -> int:
    """How many items get files anew in this run, since those that were there do not serve."""
    return sum(bool(getattr(item, _ANEW, False)) for item in items)
