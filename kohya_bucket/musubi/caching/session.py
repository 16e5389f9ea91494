"""One data set while it is cached: what is current is not made again, what cannot be read is left out.

musubi-tuner's own loops go on deciding what is encoded in which batch, and remove what they find beyond the data set.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from kohya_bucket.adapter.guard import end_run
from kohya_bucket.latents.stale import Reason, Stale
from kohya_bucket.musubi.caching.judge import Caches
from kohya_bucket.musubi.caching.names import without_clip
from kohya_bucket.musubi.caching.reading import PickedSource
from kohya_bucket.musubi.caching.sources import Identity, Source, identity
from kohya_bucket.texts import counted, one_line, some

__all__ = ["ORIGIN", "Origin", "Session", "pick_items", "session_of"]

ORIGIN = "_kohya_bucket_origin"
"""Attribute of an item: what it is, for whatever saves it."""

_MADE_NOTHING = "musubi-tuner made nothing of it, for the reason in its lines above: take it out of the data set"

logger = logging.getLogger("kohya_bucket")


class Origin:
    """Which item of which session."""

    def __init__(self, session: Session, source: Source) -> None:
        self.session, self.source = session, source


class Session:
    """The caching of one data set, of latents or of captions.

    Attributes:
        caches: the folder as it was before.
        text: captions are cached.
        passes: how many times the captions were gone through before, in this process.
        left_out: why, by place in the data set's list.
        identities: of each item's files, as they were before they were read.
        clips: of each video, all that are made of it.
    """

    def __init__(self, caches: Caches, *, text: bool) -> None:
        self.caches, self.text = caches, text
        self.passes = -1
        self.left_out: dict[int, str] = {}
        self.identities: dict[int, list[Identity]] = {}
        self.clips: dict[int, list[tuple[int, int]]] = {}
        self.kept: set[str] = set()
        self.kept_items: set[int] = set()
        self._reasons: dict[str, list[Reason]] = {}
        self._lock = threading.Lock()

    @property
    def selector(self) -> Any:
        return self.caches.selector

    @property
    def begin(self) -> str:
        """How the names of the tensors begin that this pass makes."""
        passes = self.caches.family.passes
        return passes[self.passes] if 0 <= self.passes < len(passes) else ""

    def wants(self, number: int) -> bool:
        """Whether an item must be made."""
        source = self.caches.table.at(number)
        if source is None:
            return False
        reasons = self._why(source)
        if reasons:
            self._wanted.add(number)
        unfinished = bool(self.begin) and bool(reasons) and reasons[0].kind is Stale.PART
        if reasons and reasons[0].kind is not Stale.MISSING and not unfinished:
            self._reasons[source.name] = reasons
        return bool(reasons)

    def before(self, number: int, *, pictures: bool) -> None:
        source = self.source(number)
        if pictures and number not in self.identities:
            known = [identity(file, content=True) for file in source.files]
            with self._lock:
                self.identities[number] = known

    def failed(self, number: int, why: str) -> None:
        with self._lock:
            self.left_out[number] = why

    def source(self, number: int) -> Source:
        source = self.caches.table.at(number)
        if source is None:
            raise LookupError(number)
        return source

    def take(self, item: Any) -> bool:
        """Whether an item of a batch is one; it is then told what it is."""
        source = self.caches.table.of_item(item, clips=self.caches.clips)
        if source is None:
            return True
        self._taken.add(source.number)
        setattr(item, ORIGIN, Origin(self, source))
        return source.number not in self.left_out

    def note_clip(self, source: Source, item_key: str) -> None:
        """A clip of a video is made: all of one video are before the first of them comes in a batch."""
        clip = without_clip(item_key)[1]
        if clip is not None and clip not in self.clips.setdefault(source.number, []):
            self.clips[source.number].append(clip)

    def removable(self, paths: list[str]) -> list[str]:
        """Of files that the trainer removes unless it made them just now: those that no item has.

        A folder without items may be one of a drive that is not there: nothing is removed because of it.
        """
        if not self.caches.table.sources:
            return []
        if self.text:
            if self.caches.per_clip:  # asked for before the captions are gone through
                for source in self.caches.table.sources:
                    self._why(source)
            keep = self.kept | {self.caches.text_path(source).name for source in self.caches.table.sources}
            return [path for path in paths if os.path.basename(path) not in keep]
        broken = {self.source(number).stem for number in self.left_out}
        keep = self.kept | {os.path.basename(f.path) for stem in broken for f in self.caches.named.get(stem, ())}
        return [path for path in paths if os.path.basename(path) not in keep]

    def report(self) -> None:
        """One line for what was kept, made and left out; the end of the run where nothing is left."""
        sources, out = self.caches.table.sources, self.left_out
        for number in self._wanted - self._taken:
            out.setdefault(number, _MADE_NOTHING)
        names = [f"{self.source(i).name}: {why}" for i, why in sorted(out.items())]
        if len(out) == len(sources) and sources:
            end_run(f"not one of {counted(len(sources), 'item')} can be read: {some(names)}")
        what = counted(len(sources), "caption" if self.text else "item")
        made = len(sources) - len(self.kept_items) - len(out)
        logger.info("%s: %d current, %d made", what, len(self.kept_items), made)
        if self._reasons:
            again = [f"{name} ({why[0]})" for name, why in self._reasons.items()]
            logger.info("made again: %s", one_line(some(again)))
        if names:
            logger.warning("%s left out: %s", counted(len(names), "item"), one_line(some(names, 10)))

    def begin_pass(self) -> None:
        self.passes += 1
        self.kept_items = set()
        self._wanted: set[int] = set()
        self._taken: set[int] = set()
        self._reasons.clear()

    def _why(self, source: Source) -> list[Reason]:
        if self.text:
            try:
                caption = self.caches.dataset.datasource.get_caption(source.number)[1]
            except Exception:  # the fetch will say it
                return [Reason(Stale.MISSING)]
            texts = self.caches.text(source, caption, self.begin)
            reasons = list(texts.reasons)
            self.kept |= set(texts.files)
        else:
            found = self.caches.latents(source)
            reasons = list(found.reasons)
            self.kept |= {os.path.basename(file.path) for file in found.files}
        if not reasons:
            self.kept_items.add(source.number)
        return reasons


_sessions: WeakKeyDictionary[Any, Session] = WeakKeyDictionary()


def session_of(dataset: Any, make: Any = None, *, text: bool = False) -> Session | None:
    """The session of a data set; with `make`, a new one of its caches."""
    if make is not None:
        _sessions[dataset] = Session(make(), text=text)
    return _sessions.get(dataset)


@contextmanager
def pick_items(dataset: Any, session: Session) -> Iterator[None]:
    """The data set hands out what the session wants."""
    datasource = dataset.datasource
    session.begin_pass()
    dataset.datasource = PickedSource(datasource, session)
    try:
        yield
    finally:
        dataset.datasource = datasource
    session.report()
