"""What the members of a tar's samples are: image, caption, or something else, and what is odd about them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import IMAGE_EXTENSIONS
from kohya_bucket.texts import one_line

__all__ = ["Oddities", "grouped", "plain_ending", "split_key"]

_log = logging.getLogger(__name__)
_SHOWN = 3
_MOST_ENDINGS = 8


def split_key(name: str) -> tuple[str, str]:
    """("dir/a", "seg.png") of "dir/a.seg.png", as webdataset splits; ("", "") for names without a dot or stem."""
    folder, slash, base = name.rpartition("/")
    stem, dot, ending = base.partition(".")
    return (folder + slash + stem, ending.lower()) if stem and dot else ("", "")


def grouped(
    shard: str, members: Iterable[tuple[str, tuple[int, int]]]
) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """(key, {ending: (offset, length)}) of each sample, from a tar's members in their order.

    Raises:
        KohyaBucketError: a name is there twice in one sample.
    """
    current: str = ""
    sample: dict[str, tuple[int, int]] = {}
    for name, place in members:
        key, ending = split_key(name)
        if not key:
            continue
        if key != current:
            if sample:
                yield current, sample
            current, sample = key, {}
        if ending in sample:
            raise KohyaBucketError(
                f"{shard}: {name} is there twice in one sample, so it is not clear which one to use: build the "
                "shard again without one of them"
            )
        sample[ending] = place
    if sample:
        yield current, sample


def plain_ending(ending: str | None) -> str | None:
    """An ending as members are compared by it: without the first dot, in small letters."""
    return None if ending is None else ending.removeprefix(".").lower() or None


@dataclass
class _Some:
    """How many there were, and the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, name: str, endings: Iterable[str]) -> None:
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(f"{name} ({', '.join(endings)})")

    def __str__(self) -> str:
        return ", ".join(self.first) + (" and others" if self.count > _SHOWN else "")


@dataclass
class Oddities:
    """Chooses the image of each sample, and counts what is odd: the log says it, since it can be read all the same.

    Attributes:
        image: ending of the image; None: the first member that is one.
        caption: ending of the caption; None: captions are not wanted.
    """

    image: str | None
    caption: str | None
    _without: _Some = field(default_factory=_Some)
    _several: _Some = field(default_factory=_Some)
    _endings: dict[str, None] = field(default_factory=dict)

    def image_of(self, key: str, endings: Collection[str]) -> str | None:
        """Which of the members of sample `key` is its image; None: there is none."""
        self._endings.update(dict.fromkeys(endings))
        if self.image is not None:
            found = [ending for ending in endings if ending == self.image]
        else:
            found = [ending for ending in endings if "." + ending.rpartition(".")[2] in IMAGE_EXTENSIONS]
        if not found:
            self._without.add(key, endings)
            return None
        if len(found) > 1:
            self._several.add(key, endings)
        return found[0]

    def warn(self, where: str) -> None:
        """Say what was odd about the samples of `where`."""
        if self._without.count:
            _log.warning(
                "%s: no image in %d of the samples, so these are left out: %s; the members of a sample must follow "
                "each other",
                one_line(where), self._without.count, one_line(self._without),
            )  # fmt: skip
        if self._several.count:
            _log.warning(
                "%s: several images in %d of the samples, so the first one is used: %s; in Python, image=... chooses "
                "another by its ending",
                one_line(where), self._several.count, one_line(self._several),
            )  # fmt: skip
        if self.caption is not None and self._endings and self.caption not in self._endings:
            _log.warning(
                "%s: no captions: no member ends in .%s, only in %s; choose another ending with "
                "--caption-extension or caption=...",
                one_line(where), self.caption,
                one_line(", ".join(f".{ending}" for ending in sorted(self._endings)[:_MOST_ENDINGS])),
            )  # fmt: skip
