"""Which cached latents of ai-toolkit are still those of their image.

Its names hold how an image is cut, and nothing of its content: the latents of an edited image, and a file that was cut
off or changed, would be trained on. Such an image gets another name, under which ai-toolkit encodes it again; no file
is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kohya_bucket.errors import reading
from kohya_bucket.files import write_file
from kohya_bucket.inputs import open_input
from kohya_bucket.trainers.door.tensor_files import TEXTS, parts_of, with_texts

ANEW = "_anew"
"""In the names that images get whose latents are not used; a number follows."""

DIGEST = "kohya_bucket_digest"
"""Text of a file of latents that was written behind this door; others are taken as they are."""


def current_name(path: str, image: str) -> str:
    """`path`, or the first name like it under which there are no latents, or such as were made of the image as it is.

    An image that is replaced by one with an older modification time is not noticed.
    """
    stem, ending = os.path.splitext(path)
    return next(one for n in count() if _serves(one := f"{stem}{ANEW}{n}{ending}" if n else path, image))


def _serves(path: str, image: str) -> bool:
    """Whether nothing lies there yet, or whole latents as they were written that are no older than the image."""
    try:
        with safe_open(path, framework="np") as file:
            digest = (file.metadata() or {}).get(DIGEST)
        whole = digest is None or digest == _digest(_content(path))
        return whole and os.path.getmtime(path) >= _changed(image)
    except SafetensorError:
        return False  # cut off
    except OSError:
        return True  # not there; or it cannot be read now, which ai-toolkit says itself


def note_digest(path: str) -> None:
    """Let a file of latents that was just written say what it holds.

    Raises:
        LatentStoreError: the disk refuses.
        UnreadableError: it cannot be read now.
    """
    with reading(path):
        content = _content(path)
    write_file(Path(path), [with_texts(content, {DIGEST: _digest(content)})], sync=False)


def _content(path: str) -> bytes:
    with open_input(path) as file:
        return file.read()


def _digest(content: bytes) -> str:
    """Of the tensors in a whole file, and of what the header says of them."""
    table, tensors = parts_of(content)
    table.pop(TEXTS, None)
    digest = hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16)
    digest.update(tensors)
    return digest.hexdigest()


def _changed(image: str) -> float:
    """When an image was changed; of one that is dated in the future, when it came to be there."""
    status = os.stat(image)
    return status.st_mtime if status.st_mtime <= time.time() else status.st_ctime


def encoded_anew(items: list[Any]) -> int:
    """How many items have such a name."""
    return sum(ANEW in os.path.basename(getattr(item, "_latent_path", None) or "") for item in items)
