"""What versions of sd-scripts read differently in configs, metadata and captions, and which of it a checkout reads."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["NEWEST", "Change", "Release"]

_FILES = ("config_util.py", "train_util.py", "finetuning_dataset.py")


class Change(enum.Enum):
    """One change: the version that brought it, and words that no earlier `library/` holds.

    Forks took over some changes and not others, so a checkout is judged by its words and not by a version.
    """

    # the keys validation_split, validation_seed, custom_attributes, resize_interpolation
    VALIDATION = ("0.10", "validation_split")
    # metadata lists images with their sizes, as .json or .jsonl; before, it could prescribe buckets
    IMAGE_LISTS = ("0.10", 'image_path"]')
    # the key skip_image_resolution; control images to spare do not stop it; a metadata_cache.json keeps captions apart
    SKIPPING = ("0.10.2", "skip_image_resolution")
    # metadata keys without extension are looked up; width and height in .jsonl
    STEMS = ("0.10.6", '"width" in line_md')
    # with enable_wildcard, the tags of an image without caption are trained
    TAGS_ALONE = ("0.11.2", "caption_lines")

    @property
    def since(self) -> str:
        """The version that brought it."""
        return self.value[0]


@dataclass(frozen=True)
class Release:
    """A version of sd-scripts, by the changes that are in it; by default all.

    Attributes:
        changes: what it has; `change in release` asks.
        name: what messages call it.
    """

    changes: frozenset[Change] = frozenset(Change)
    name: str = field(default="the newest", compare=False)

    def __contains__(self, change: Change) -> bool:
        return change in self.changes

    @classmethod
    def of(cls, version: str) -> Release:
        """That of a version such as `v0.9.1`, or the last of a series such as `0.10`; else the newest."""
        numbers = _numbers(version)
        if not numbers:
            return NEWEST
        changes = (change for change in Change if _numbers(change.since)[: len(numbers)] <= numbers)
        return cls(frozenset(changes), version)

    @classmethod
    def in_checkout(cls, folder: Path) -> Release:
        """That of a checkout, by the source in its `library` folder."""
        text = ""
        for name in _FILES:
            file = folder / "library" / name
            text += file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        return cls(frozenset(change for change in Change if change.value[1] in text), str(folder))


NEWEST = Release()


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()
