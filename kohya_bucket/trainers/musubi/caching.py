"""One dataset while it is cached: what is current is not made again, what cannot be read is left out.

musubi-tuner's own loops go on deciding what is encoded in which batch, and remove what they find beyond the dataset.
What was encoded is saved whole or not at all, with what it was made from.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.formats import not_loaded
from kohya_bucket.images.resize import Pixels, resize_and_crop
from kohya_bucket.latents.fingerprint import Identity, Stale, StaleReason
from kohya_bucket.latents.finite import first_not_finite
from kohya_bucket.texts import counted, one_line, some
from kohya_bucket.trainers.door.ranks import end_run
from kohya_bucket.trainers.musubi.cache_files import REPAIRED, Note, TensorFile, write_with_note
from kohya_bucket.trainers.musubi.caches import Caches, Focus, fingerprint_of
from kohya_bucket.trainers.musubi.items import Source, identity, without_clip
from kohya_bucket.trainers.musubi.objects import Selector

_ORIGIN = "_kohya_bucket_origin"
"""Attribute of an item: the session and the source that it is of, for whatever saves it."""
_FOCUS = "_kohya_bucket_focus"
"""Attribute of a picture: what its crop keeps."""
_frames = threading.local()  # its `focus` is that of the clip which this thread reads
_MADE_NOTHING = "musubi-tuner made nothing of it, for the reason in its lines above: take it out of the dataset"

logger = logging.getLogger("kohya_bucket")


class Session:
    """The caching of one dataset, of latents or of captions.

    Attributes:
        caches: the folder as it was before.
        text: captions are cached; `captions_alone`: and their encoder sees no images.
        caching: of the present pass.
        left_out: why, by place in the dataset's list.
        clips: of each video, all that are made of it, in the order of their keys.
    """

    def __init__(self, caches: Caches, *, text: bool) -> None:
        self.caches, self.text, self.captions_alone = caches, text, text
        self.left_out: dict[int, str] = {}
        self.clips: dict[int, list[tuple[int, int]]] = {}
        self._identities: dict[int, list[Identity]] = {}  # of the files, as they were before they were read
        self._kept_files: set[str] = set()  # names of those that serve
        self._pass = -1  # number of the present one: captions may be gone through several times
        self._later: list[Saved] | None = None
        self._taken: set[int] = set()  # items that came in a batch
        self._earlier: set[int] = set()  # of these, those of an earlier pass, to which a further one may add
        self._begin_pass()

    def _begin_pass(self) -> None:
        from kohya_bucket.latents.encode.pipeline import Caching

        self._kept_items: set[int] = set()
        self._wanted: set[int] = set()  # items that are handed out and came in no batch yet
        self._reasons: dict[str, list[StaleReason]] = {}
        what, count = "caption" if self.text else "item", len(self.caches.table.sources)
        self.caching = Caching(what, count, keep=_save)

    @contextmanager
    def picking(self, dataset: Any) -> Iterator[None]:
        """The dataset hands out what must be made; then a line says what was."""
        self._pass += 1
        if self.caches.family.passes is None:  # it is unknown what each pass makes
            self._earlier |= self._taken
        self._begin_pass()
        datasource = dataset.datasource
        dataset.datasource = PickedSource(datasource, self)
        try:
            yield
        finally:
            dataset.datasource = datasource
        self._report()

    def wants(self, number: int) -> bool:
        source = self.caches.table.at.get(number)
        if source is None:
            return False
        if number in self._earlier:
            self._wanted.add(number)
            return True
        reasons = self._why(source)
        self.caching.to_do -= not reasons
        self.caching.current += not reasons
        if reasons:
            self._wanted.add(number)
        unfinished = bool(self._tensor_prefix) and bool(reasons) and reasons[0].kind is Stale.PART
        if reasons and reasons[0].kind is not Stale.MISSING and not unfinished:
            self._reasons[source.name] = reasons
        return bool(reasons)

    @property
    def _tensor_prefix(self) -> str:
        """How the names of the tensors begin that this pass makes; empty where there is one pass, or it is unknown."""
        passes = self.caches.family.passes or ()
        return passes[self._pass] if 0 <= self._pass < len(passes) else ""

    def _why(self, source: Source) -> list[StaleReason]:
        if self.text:
            try:
                caption = self.caches.dataset.datasource.get_caption(source.number)[1]
            except Exception:  # the fetch will say it
                return [StaleReason(Stale.MISSING)]
            caches = self.caches.text(source, caption, self._tensor_prefix)
        else:
            caches = self.caches.latents(source)
        self._kept_files |= set(caches.files)
        if not caches.reasons:
            self._kept_items.add(source.number)
        return list(caches.reasons)

    def before(self, number: int, *, pictures: bool) -> None:
        """An item is about to be read, on any thread."""
        if pictures and number not in self._identities:
            files = self.caches.table.at[number].files
            self._identities[number] = [identity(file, content=True) for file in files]

    def take(self, item: Any) -> bool:
        """Whether an item of a batch is one; it is then told what it is."""
        source = self.caches.table.of_item(item, clips=self.caches.clips)
        if source is None:
            return True
        self._wanted.discard(source.number)
        self._taken.add(source.number)
        setattr(item, _ORIGIN, (self, source))
        return source.number not in self.left_out

    def note_clip(self, item: Any) -> None:
        """A clip of a video is made: all of one video are before the first of them comes in a batch."""
        source = self.caches.table.of_item(item, clips=self.caches.clips)
        clip = without_clip(item.item_key)[1]
        if source is None or clip is None or item.frame_count is None:
            return
        if clip not in self.clips.setdefault(source.number, []):
            self.caching.to_do += bool(self.clips[source.number])
            self.clips[source.number].append(clip)

    @contextmanager
    def saved_later(self) -> Iterator[list[Saved]]:
        """What is saved meanwhile is not yet."""
        self._later = []
        try:
            yield self._later
        finally:
            self._later = None

    def save(self, saved: Saved) -> None:
        """Behind the encoder."""
        if self._later is not None:
            self._later.append(saved)
            return
        width, height = saved.item.bucket_size[:2]
        self.caching.put(saved, 1, width * height * (saved.item.frame_count or 1))

    def removable(self, paths: list[str]) -> list[str]:
        """Of files that the trainer removes unless it made them just now: those that no item has.

        A folder without items may be one of a drive that is not there: nothing is removed because of it.
        """
        sources = self.caches.table.sources
        if not sources:
            return []
        if self.text:
            if self.caches.per_clip:  # to find the files to keep: the captions are gone through only after this
                for source in sources:
                    self._why(source)
            keep = {self.caches.text_path(source).name for source in sources}
        else:
            broken = {self.caches.table.at[number].stem for number in self.left_out}
            keep = {os.path.basename(f.path) for stem in broken for f in self.caches.named.get(stem, ())}
        return [path for path in paths if os.path.basename(path) not in self._kept_files | keep]

    def _report(self) -> None:
        """One line for what was kept, made and left out; the end of the run where nothing is left."""
        sources, out = self.caches.table.sources, self.left_out
        for number in self._wanted:
            out.setdefault(number, _MADE_NOTHING)
        names = [f"{self.caches.table.at[i].name}: {why}" for i, why in sorted(out.items())]
        if len(out) == len(sources) and sources:
            end_run(f"none of {counted(len(sources), 'item')} can be cached: {some(names)}")
        what = counted(len(sources), "caption" if self.text else "item")
        kept = len(self._kept_items)
        logger.info("%s: %d current, %d made", what, kept, len(sources) - kept - len(out))
        if self._reasons:
            again = [f"{name} ({why[0]})" for name, why in self._reasons.items()]
            logger.info("made again: %s", one_line(some(again)))
        if self.caches.uncaptioned:
            logger.warning("%s", self.caches.uncaptioned)
        if names:
            logger.warning("%s left out: %s", counted(len(names), "item"), one_line(some(names, 10)))

    def note(self, item: Any, source: Source, file: TensorFile) -> Note | None:
        """What a file was made from; None where that is not known of latents, since nothing was asked before."""
        caches, made = self.caches, self.caches.made_by
        files, settings = self._identities.get(source.number, []), caches.settings_of(source, text=self.text)
        clips = sorted(self.clips.get(source.number, []))
        if self.text:
            return Note(files, made | ({REPAIRED: "true"} if caches.repair else {}), settings, clips)
        if not files:
            return None
        bucket = None if caches.clips else tuple(item.bucket_size[:2])
        dtype, focus = next(iter(file.shapes), "").rpartition("_")[2], caches.focus.get(source.number)
        fingerprint = fingerprint_of(files[0], tuple(item.original_size), bucket, made.get("vae", ""), dtype, focus)
        return Note(files, made, settings, clips, fingerprint)

    def adds(self, source: Source, caption: str) -> bool:
        """Whether a pass adds to what another pass has made of this caption."""
        if source.number in self._earlier:
            return True
        reasons = self.caches.text(source, caption).reasons if self.caches.family.passes else None
        return reasons is not None and all(reason.kind is Stale.PART for reason in reasons)


@dataclass(frozen=True)
class Saved:
    """What a program saves of an item: a copy of it, its tensors by name, and what writes them to the item's path."""

    item: Any
    tensors: Mapping[str, Any]
    write: Callable[[Any], object]
    text: bool


def save_behind(item: Any, tensors: Mapping[str, Any], write: Callable[[Any], object], *, text: bool) -> None:
    """Save an item while the next one is encoded, or at once where nothing is known of it."""
    session = session_of(item)
    saved = Saved(copy.copy(item), tensors, write, text)
    _save(saved) if session is None else session.save(saved)


def session_of(item: Any) -> Session | None:
    """That an item of a batch is of."""
    origin: tuple[Session, Source] | None = getattr(item, _ORIGIN, None)
    return None if origin is None else origin[0]


def _save(saved: Saved) -> None:
    if not leave_out_not_finite(saved.item, saved.tensors):
        save_item(saved.item, lambda: saved.write(saved.item), text=saved.text)


def save_item(item: Any, save: Callable[[], object], *, text: bool) -> None:
    """What `save` writes to the item's path, whole or not at all, with what it was made from.

    With `text`, `save` adds to a file that is there: only what another pass has made of this caption is.

    Raises:
        LatentStoreError: the disk refuses.
    """
    origin: tuple[Session, Source] | None = getattr(item, _ORIGIN, None)
    attribute = "text_encoder_output_cache_path" if text else "latent_cache_path"
    final_path: str = getattr(item, attribute)
    path = Path(final_path)
    keeps = text and path.exists() and (origin is None or origin[0].adds(origin[1], item.caption))

    def write(temporary: Path) -> None:
        if keeps:
            shutil.copyfile(path, temporary)
        setattr(item, attribute, os.fspath(temporary))
        try:
            save()
        finally:
            setattr(item, attribute, final_path)

    write_with_note(path, write, lambda file: None if origin is None else origin[0].note(item, origin[1], file))


def leave_out_not_finite(item: Any, tensors: Mapping[str, Any]) -> bool:
    """Whether an item is left out because NaN or infinity was made of it: musubi-tuner would write 0 for NaN."""
    origin: tuple[Session, Source] | None = getattr(item, _ORIGIN, None)
    if origin is None or not (bad := first_not_finite(tensors.items())):
        return False
    reason = StaleReason(Stale.NOT_FINITE, bad)
    origin[0].left_out[origin[1].number] = f"{reason}: see whether it is with another --vae_dtype or without fp8"
    return True


_SIDE = 64  # pixels of a picture that stands in for one that cannot be read; it goes into no cache


class PickedSource:
    """Stands in for a data source while its items are cached.

    A fetch that fails gives a picture of no meaning, because the loop that asks for it cannot go on without one: the
    session knows of it, and takes the item out of the batch that it comes in.
    """

    def __init__(self, inner: Any, session: Session) -> None:
        self._inner = inner
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Callable[[], Any]]:
        for number, fetch in enumerate(self._inner):
            if self._session.wants(number):
                guarded_fetch = partial(self._fetch, number, fetch)
                vars(guarded_fetch).update(getattr(fetch, "__dict__", {}))  # which line of a list it is
                yield guarded_fetch

    def _fetch(self, number: int, fetch: Callable[[], Any]) -> Any:
        pictures, caches = not self._inner.caption_only, self._session.caches
        focus = caches.focus.get(number)
        try:
            self._session.before(number, pictures=pictures)
            _frames.focus = focus if caches.clips else None  # frames of a clip are cut while they are read
            fetched = fetch()
            if pictures:
                _load(fetched, caches.selector)
                if focus is not None and not caches.clips:  # pictures later: they are told what to keep
                    for picture in _pictures(fetched, controls=caches.focus_of_controls):
                        setattr(picture, _FOCUS, focus)
        except MemoryError:
            raise
        except Exception as error:  # whatever a decoder raises at a file
            self._session.left_out[number] = _said(error)
            return self._stand_in(caches.table.at[number], pictures=pictures)
        finally:
            _frames.focus = None
        return caches.table.at[number].item_key, *fetched[1:]

    def _stand_in(self, source: Source, *, pictures: bool) -> Any:
        caption = source.caption or ""
        if not pictures:
            return source.item_key, caption
        if not hasattr(self._inner, "get_image_data"):
            return source.item_key, [np.zeros((_SIDE, _SIDE, 3), np.uint8)], caption, None
        from PIL import Image

        picture = Image.new("RGB", (_SIDE, _SIDE))
        several = hasattr(self._inner, "multiple_target")
        return source.item_key, [picture] if several else picture, caption, None


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
        fetched = datasource.get_video_data(number)
        _load(fetched, selector)
        frames = len(fetched[1])
        least = 1 if dataset.frame_extraction == "full" else min(dataset.target_frames)
        if frames < least:
            return f"{counted(frames, 'frame')}, and none of target_frames is that short"
    except MemoryError:
        raise
    except Exception as error:
        return _said(error)
    return ""


def _load(fetched: Any, selector: Selector) -> None:
    """Decode what is decoded only when it is used, and see that there is a bucket for it."""
    images = _pictures(fetched, controls=False)
    for picture in _pictures(fetched, controls=True):
        if hasattr(picture, "load"):
            picture.load()
    if not images:
        raise KohyaBucketError("it has no frames")
    if 0 in getattr(images[0], "shape", ())[:2]:
        raise KohyaBucketError("it is too small: with bucket_no_upscale it gets no bucket")
    if hasattr(images[0], "size") and isinstance(images[0].size, tuple):
        width, height = images[0].size
        if min(selector.get_bucket_resolution((width, height))) < 1:
            raise KohyaBucketError(f"{width}x{height} is too small: with bucket_no_upscale it gets no bucket")


def _pictures(fetched: Any, *, controls: bool) -> list[Any]:
    """What a source has fetched: the image, or several targets, or frames; and control images or frames."""
    images = fetched[1] if isinstance(fetched[1], list) else [fetched[1]]
    return [*images, *(fetched[3] or ())] if controls and len(fetched) > 3 else images


def focus_in(picture: Any) -> Focus | None:
    """What the crop of a picture or frame keeps that is about to be cut; None: it is in the middle."""
    focus: Focus | None = getattr(picture, _FOCUS, None) or getattr(_frames, "focus", None)
    return focus


def cut(picture: Any, bucket: tuple[int, int], focus: Focus | None) -> Pixels:
    """What musubi-tuner's `resize_image_to_bucket` makes of an image or array, with the crop that keeps a focus."""
    pixels = np.asarray(picture)
    made = fingerprint_of((0, 0, ""), (pixels.shape[1], pixels.shape[0]), bucket, "", "", focus)
    filter_ = made.interpolation.partition("/")[0].replace("none", "auto")
    return resize_and_crop(pixels, made.resized_size, bucket, filter_, made.crop)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, KohyaBucketError) else not_loaded(error)
