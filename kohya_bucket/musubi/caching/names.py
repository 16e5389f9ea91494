"""Names of cache files, in the form that musubi-tuner reads, and what they say."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["CacheName", "clip_of_text", "foreign_names", "item_stem", "stems_of", "without_clip"]

_CLIP = re.compile(r"_(\d{5,})-(\d{3,})$")
_CLIP_OF_FILE = re.compile(r"_(\d{5,})-(\d{3,})(?:-(\d{4,}))?$")


@dataclass(frozen=True)
class CacheName:
    """What the name of a file with latents says.

    Attributes:
        path: of the file.
        stem: the item's.
        size: (width, height) of the image, or of a clip's resized frames.
        clip: first frame and number of frames; None for images.
        section: which part of a clip it is, where it is in several files.
    """

    path: str
    stem: str
    size: tuple[int, int]
    clip: tuple[int, int] | None = None
    section: int | None = None

    @classmethod
    def of(cls, path: str, family: str, *, clips: bool) -> CacheName | None:
        """What a path says; None where musubi-tuner could not read it."""
        name = os.path.basename(path)
        found = re.fullmatch(rf"(.*)_(\d+)x(\d+)_{re.escape(family)}\.safetensors", name, re.DOTALL)
        if found is None:
            return None
        stem, size = found[1], (int(found[2]), int(found[3]))
        if not clips:
            return cls(path, stem, size)
        part = _CLIP_OF_FILE.search(stem)
        if part is None:
            return None
        section = None if part[3] is None else int(part[3])
        return cls(path, stem[: part.start()], size, (int(part[1]), int(part[2])), section)


def clip_of_text(name: str, family: str) -> tuple[str, tuple[int, int]] | None:
    """(stem, clip) of a file with a clip's text outputs; None for other files."""
    body = name.removesuffix(f"_{family}_te.safetensors")
    found = _CLIP.search(body)
    return None if found is None or body == name else (body[: found.start()], (int(found[1]), int(found[2])))


def foreign_names(folder: str, family: str, *, clips: bool) -> list[str]:
    """Files that musubi-tuner takes for caches of a family, in whose names it finds no size, or of clips no frames.

    It ends with an error at the first. Source: `prepare_for_training` of its data sets.
    """
    ending, frames = f"_{family}.safetensors", r"\d+-\d+(?:-[^_]*)?_" if clips else ""
    wanted = re.compile(rf"(?:.*_)?{frames}\d+x\d+{re.escape(ending)}", re.DOTALL)
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(n for n in names if n.endswith(ending) and not n.startswith(".") and wanted.fullmatch(n) is None)


def item_stem(key: str) -> str:
    """What the names of an item's files begin with in musubi-tuner: the file's name without its extension."""
    return os.path.splitext(os.path.basename(key))[0]


def without_clip(key: str) -> tuple[str, tuple[int, int] | None]:
    """(the video that a clip is of, its first frame and number of frames)."""
    body, extension = os.path.splitext(key)
    found = _CLIP.search(body)
    return (key, None) if found is None else (body[: found.start()] + extension, (int(found[1]), int(found[2])))


def stems_of(items: Sequence[tuple[str, str | None]], folder: str) -> list[str]:
    """A stem for each item, all different, in any case where case does not count.

    An item keeps the one that musubi-tuner gives it, unless another item of the data set has that too. Then all of
    them get a part of a hash: a further item changes no stem but those of items that it shares one with.

    Args:
        items: file, and the caption where items of one file are told apart by it.
        folder: paths count from there, so that a data set that is moved as a whole keeps its names.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, (key, _) in enumerate(items):
        groups[item_stem(key).casefold()].append(i)
    stems = [item_stem(key) for key, _ in items]
    for shared in groups.values():
        if len(shared) > 1:
            for i in shared:
                key, caption = items[i]
                text = f"{_from(folder, key)}\0{caption or ''}".encode("utf-8", "surrogatepass")
                stems[i] += f"-{hashlib.blake2b(text, digest_size=6).hexdigest()}"
    return stems


def _from(folder: str, path: str) -> str:
    with suppress(ValueError):  # another drive
        path = os.path.relpath(path, folder)
    return path.replace(os.sep, "/")
