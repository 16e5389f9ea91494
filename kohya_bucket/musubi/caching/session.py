"""One data set while it is cached: what is current is not made again, what cannot be read is left out.

musubi-tuner's own loops go on deciding what is encoded in which batch, and remove what they find beyond the data set.
What was encoded is saved whole or not at all, with what it was made from.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from kohya_bucket.adapter.door import end_run
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.formats import not_loaded
from kohya_bucket.latents.fingerprint import Reason, Stale
from kohya_bucket.musubi.caching.files import REPAIRED, LatentsNote, TensorFile, TextNote, texts_of, write_with_texts
from kohya_bucket.musubi.caching.judge import Caches, fingerprint_of_clip, fingerprint_of_image
from kohya_bucket.musubi.caching.sources import Identity, Source, identity, without_clip
from kohya_bucket.musubi.objects import Selector
from kohya_bucket.texts import counted, one_line, some

__all__ = [
    "ORIGIN",
    "Origin",
    "PickedSource",
    "Session",
    "pick_items",
    "save_latents",
    "save_text",
    "session_of",
    "why_unreadable",
]

Fetch = Callable[[], Any]
_SIDE = 64  # pixels of a picture that stands in for one that cannot be read; it goes into no cache


class Picker(Protocol):
    """Chooses which items are fetched, and takes note of what became of them. Called on several threads."""

    @property
    def selector(self) -> Selector: ...

    def wants(self, number: int) -> bool: ...

    def before(self, number: int, *, pictures: bool) -> None: ...

    def failed(self, number: int, why: str) -> None: ...

    def source(self, number: int) -> Source: ...


class PickedSource:
    """Stands in for a data source while its items are cached.

    A fetch that fails gives a picture of no meaning, because the loop that asks for it cannot go on without one: the
    picker knows of it, and takes the item out of the batch that it comes in.
    """

    def __init__(self, inner: Any, picker: Picker) -> None:
        self._inner = inner
        self._picker = picker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Fetch]:
        for number, fetch in enumerate(self._inner):
            if self._picker.wants(number):
                taken = partial(self._fetch, number, fetch)
                vars(taken).update(getattr(fetch, "__dict__", {}))  # which line of a list it is
                yield taken

    def _fetch(self, number: int, fetch: Fetch) -> Any:
        pictures = not self._inner.caption_only
        try:
            self._picker.before(number, pictures=pictures)
            found = fetch()
            if pictures:
                _load(found, self._picker.selector)
        except MemoryError:
            raise
        except Exception as error:  # whatever a decoder raises at a file
            self._picker.failed(number, _said(error))
            return self._stand_in(number, pictures=pictures)
        return found

    def _stand_in(self, number: int, *, pictures: bool) -> Any:
        source = self._picker.source(number)
        caption = source.caption or ""
        if not pictures:
            return source.key, caption
        if not hasattr(self._inner, "get_image_data"):
            import numpy as np

            return source.key, [np.zeros((_SIDE, _SIDE, 3), np.uint8)], caption, None
        from PIL import Image

        picture = Image.new("RGB", (_SIDE, _SIDE))
        several = hasattr(self._inner, "multiple_target")
        return source.key, [picture] if several else picture, caption, None


def why_unreadable(dataset: Any, number: int, selector: Selector) -> str:
    """Why an item cannot be cached; an empty text where it can be."""
    datasource = dataset.datasource
    try:
        if hasattr(datasource, "get_image_data"):
            _load(datasource.get_image_data(number), selector)
            return ""
        fps = (None, None) if dataset.source_fps is None else (dataset.source_fps, dataset.target_fps)
        datasource.set_bucket_selector(selector)
        datasource.set_source_and_target_fps(*fps)
        found = datasource.get_video_data(number)
        _load(found, selector)
        frames = len(found[1])
        least = 1 if dataset.frame_extraction == "full" else min(dataset.target_frames)
        if frames < least:
            return f"{counted(frames, 'frame')}, and none of target_frames is that short"
    except MemoryError:
        raise
    except Exception as error:
        return _said(error)
    return ""


def _load(found: Any, selector: Selector) -> None:
    """Decode what is decoded only when it is used, and see that there is a bucket for it."""
    images, controls = found[1], found[3] if len(found) > 3 else None
    images = images if isinstance(images, list) else [images]
    for picture in (*images, *(controls or ())):
        if hasattr(picture, "load"):
            picture.load()
    if not images:
        raise KohyaBucketError("it has no frames")
    if 0 in getattr(images[0], "shape", ())[:2]:
        raise KohyaBucketError("it is too small: with bucket_no_upscale it gets no bucket")
    if hasattr(images[0], "size") and isinstance(images[0].size, tuple):
        width, height = images[0].size
        bucket = selector.get_bucket_resolution((width, height))
        if min(bucket) < 1:
            raise KohyaBucketError(f"{width}x{height} is too small: with bucket_no_upscale it gets no bucket")


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, KohyaBucketError) else not_loaded(error)


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


_LATENTS, _TEXT = "latent_cache_path", "text_encoder_output_cache_path"


def save_latents(item: Any, save: Callable[[], object]) -> None:
    """What `save` writes to the item's path.

    Raises:
        LatentStoreError: the disk refuses.
    """
    origin: Origin | None = getattr(item, ORIGIN, None)

    def texts(file: TensorFile) -> dict[str, str]:
        return {} if origin is None else texts_of(_latents_note(item, origin, file), file)

    _save(item, _LATENTS, save, texts)


def save_text(item: Any, save: Callable[[], object]) -> None:
    """As `save_latents`. `save` adds to a file that is there: only what another pass has made of this caption is."""
    origin: Origin | None = getattr(item, ORIGIN, None)

    def texts(file: TensorFile) -> dict[str, str]:
        if origin is None:
            return {}
        made = _made(origin) | ({REPAIRED: "true"} if origin.session.caches.repair else {})
        session, source = origin.session, origin.source
        settings = session.caches.settings_of_text(source)
        clips = sorted(session.clips.get(source.number, []))
        return texts_of(TextNote(session.identities.get(source.number, []), made, settings, clips), file)

    keeps = Path(getattr(item, _TEXT)) if origin is None or _adds(origin, item.caption) else None
    _save(item, _TEXT, save, texts, keeps)


def _save(
    item: Any,
    attribute: str,
    save: Callable[[], object],
    texts: Callable[[TensorFile], dict[str, str]],
    keeps: Path | None = None,
) -> None:
    path = getattr(item, attribute)

    def write(temporary: Path) -> None:
        if keeps is not None and keeps.exists():
            shutil.copyfile(keeps, temporary)
        setattr(item, attribute, os.fspath(temporary))
        try:
            save()
        finally:
            setattr(item, attribute, path)

    write_with_texts(Path(path), write, texts)


def _adds(origin: Origin, caption: str) -> bool:
    caches = origin.session.caches
    reasons = caches.text(origin.source, caption).reasons if caches.family.passes else None
    return reasons is not None and all(reason.kind is Stale.PART for reason in reasons)


def _latents_note(item: Any, origin: Origin, file: TensorFile) -> LatentsNote:
    session, source = origin.session, origin.source
    known = session.identities.get(source.number) or [identity(path, content=True) for path in source.files]
    vae, dtype = session.caches.made_by.get("vae", ""), next(iter(file.shapes), "").rpartition("_")[2]
    size: tuple[int, int] = tuple(item.original_size)
    if session.caches.clips:
        fingerprint = fingerprint_of_clip(known[0], size, vae, dtype)
    else:
        fingerprint = fingerprint_of_image(known[0], size, tuple(item.bucket_size[:2]), vae, dtype)
    clips = sorted(session.clips.get(source.number, []))
    return LatentsNote(fingerprint, known[1:], session.caches.settings_of(source), clips, _made(origin))


def _made(origin: Origin) -> dict[str, str]:
    return origin.session.caches.made_by
