"""Which caches of a dataset serve, and why others do not."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.buckets.focus import focus_crops, focus_pixels
from kohya_bucket.errors import ConfigError, reading
from kohya_bucket.files import final_name, remove_leftovers
from kohya_bucket.images.listing import from_here
from kohya_bucket.inputs import open_input
from kohya_bucket.latents.fingerprint import (
    UNKNOWN_VAE,
    Fingerprint,
    Identity,
    Stale,
    StaleReason,
    changed_since,
    stamp_is_shared,
    why_other_source,
    why_stale,
)
from kohya_bucket.texts import uncaptioned
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import focus_of
from kohya_bucket.trainers.door.tensor_files import not_finite
from kohya_bucket.trainers.musubi.architectures import ANY, Family
from kohya_bucket.trainers.musubi.cache_files import (
    REPAIRED,
    BrokenFileError,
    MadeBy,
    Note,
    Settings,
    TensorFile,
    read_tensor_file,
    why_made_otherwise,
)
from kohya_bucket.trainers.musubi.checkout import repaired_encoder
from kohya_bucket.trainers.musubi.families import family_of
from kohya_bucket.trainers.musubi.items import (
    LEFT_OUT,
    CacheName,
    Source,
    clip_of_text,
    identity,
    images_of,
    table_of,
)
from kohya_bucket.trainers.musubi.keys import CLIPS, DEPRECATED, IMAGES, OWN_SIZES, SOURCES, CommonKeys
from kohya_bucket.trainers.musubi.objects import CachedDataset, Selector

Focus = tuple[float, ...]
"""Left, top, right and bottom of what a crop keeps, in shares of the picture."""

_COMMON = {*SOURCES, *(key.name for key in fields(CommonKeys))}
_OF_IMAGES = [name for name in (*IMAGES, *DEPRECATED) if name not in _COMMON]
_OF_CLIPS = ["resolution", *(name for name in CLIPS if name not in _COMMON)]
_OF_TEXT = ["resolution", "enable_bucket", "bucket_no_upscale"]
_WINDOW, _WINDOWED = "fp_latent_window_size", ("fp", "wan")
_FOCUS = "focus"
_IMPLIED_DEFAULTS: Settings = {"bucket_no_upscale": False, "further keys": "", _FOCUS: None}
"""What notes did not say while nothing else was possible."""


def holds_clips(dataset: CachedDataset) -> bool:
    """Whether a dataset is of videos."""
    return hasattr(dataset, "frame_extraction")


def fingerprint_of(
    source: Identity, size: tuple[int, int], bucket: tuple[int, int] | None, vae: str, dtype: str,
    focus: Focus | None = None,
) -> Fingerprint:  # fmt: skip
    """Of an image resized to cover the bucket and cut out of the middle, as musubi-tuner's `resize_image_to_bucket`, or
    where a focus moves the crop.

    Without a bucket, of a clip: its frames are resized to `size` while they are read, and their own size is not kept.
    """
    bucket = bucket or size
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    resized = int(size[0] * scale + 0.5), int(size[1] * scale + 0.5)
    interpolation = "lanczos/pillow" if scale > 1 else "area/cv2"
    if size == bucket:
        resized, interpolation = size, "none"
    crop = (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2
    if focus is not None:
        sizes = np.array([resized])
        left, top = focus_crops(focus_pixels(np.array([focus]), sizes), sizes, np.array([bucket]))[0].tolist()
        crop = left, top
    return Fingerprint(*source, vae or UNKNOWN_VAE, bucket, resized, crop, interpolation, dtype)


@dataclass(frozen=True)
class ItemCaches:
    """What there is of an item's latents, or of its caption's outputs.

    Attributes:
        files: names of those that can be trained.
        reasons: why there are none.
        latents: the files again, of latents.
    """

    files: tuple[str, ...] = ()
    reasons: tuple[StaleReason, ...] = ()
    latents: tuple[tuple[CacheName, TensorFile], ...] = ()


@dataclass
class Caches:
    """The cache folder of one dataset, as it is now.

    Attributes:
        dataset: of a family that is known.
        selector: gives its buckets.
        made_by: models and options that are asked for; empty where they are unknown: they are not compared.
        package: the trainer's code; None where it is unknown.
        values: whether files that musubi-tuner made alone are read whole, for NaN and infinity.
        focus: what the crop of each item keeps, by the item's number; those without one are not in it.
        named, texts: what lies there: latents by the item's stem, and names of files with outputs of text encoders.
        makers: those of what was found to serve, with the items' numbers: of latents (False) and of captions (True).
    """

    dataset: CachedDataset
    selector: Selector
    made_by: MadeBy = field(default_factory=dict)
    package: Path | None = None
    options: AdapterOptions = field(default_factory=AdapterOptions)
    values: bool = False

    def __post_init__(self) -> None:
        if not self.dataset.cache_directory:
            raise ConfigError(
                "a dataset of a list has no cache_directory, and there is no folder to take for it: set one"
            )
        self.folder, name = Path(self.dataset.cache_directory), self.dataset.architecture
        self.family: Family = family_of(name, self.package) or ANY
        self.clips = holds_clips(self.dataset)
        self.per_clip = self.clips and self.family.per_clip
        self.repair = repaired_encoder(self.package, name)
        self.table = table_of(self.dataset)
        sources = self.table.sources
        found_focus = focus_of(self.options, [source.key for source in sources])
        rows = zip(sources, () if found_focus is None else found_focus.tolist(), strict=False)
        self.focus: dict[int, Focus] = {source.number: tuple(row) for source, row in rows if row[0] == row[0]}
        self._occasion = object()  # on which folders are looked through, into which caches may be written meanwhile
        self.makers: dict[bool, dict[str, tuple[MadeBy, list[int]]]] = {False: {}, True: {}}
        self.named: dict[str, list[CacheName]] = defaultdict(list)
        self.texts: list[str] = []
        self._texts_of_clips: dict[str, list[tuple[int, int]]] = defaultdict(list)
        names, killed = list[str](), []
        with suppress(FileNotFoundError), reading(self.folder):
            names = sorted(os.listdir(self.folder))
        for file in names:
            if f"_{name}" in (final := final_name(file)):
                killed.append(self.folder / final)
            elif file.endswith(f"_{name}_te.safetensors"):
                self.texts.append(file)
                if self.per_clip and (of_clip := clip_of_text(file, name)):
                    self._texts_of_clips[of_clip[0]].append(of_clip[1])
            elif found := CacheName.from_path(str(self.folder / file), name, clips=self.clips):
                self.named[found.stem].append(found)
        remove_leftovers(killed)

    @property
    def uncaptioned(self) -> str:
        """Why images of its folder are left out; empty where all are items."""
        folder = getattr(self.dataset, "image_directory", None)
        if not folder or not os.path.isdir(folder):
            return ""
        of_others = bool(getattr(self.dataset, "multiple_target", False))
        ending = self.dataset.caption_extension
        kept, bare = images_of(folder, ending, of_others=of_others)
        names = list(map(from_here, bare))
        return uncaptioned(names, len(kept) + len(bare), LEFT_OUT, f"{ending!r} file") if bare else ""

    @property
    def focus_of_controls(self) -> bool:
        """Whether control images are cut to the bucket of their image, and keep its focus."""
        return not any(getattr(self.dataset, name, None) for name in OWN_SIZES)

    def text_path(self, source: Source, clip: tuple[int, int] | None = None) -> Path:
        """Where a caption's outputs are, or those of one clip."""
        of_clip = "" if clip is None else f"_{clip[0]:05d}-{clip[1]:03d}"
        return self.folder / f"{source.stem}{of_clip}_{self.dataset.architecture}_te.safetensors"

    def settings_of(self, source: Source, *, text: bool) -> Settings:
        """Keys of the config that decide what is encoded, with their values as JSON has them.

        The resolution of images is among them only for an encoder of captions that sees them: else it decides their
        buckets, and those are compared. The crop of an image is compared too, but not that of what goes with it, nor
        that of a clip, whose own size is not kept: for these the focus itself is among them.
        """
        if text and not self.family.sees_controls:
            return {}
        names = [*(_OF_TEXT if text else ()), *_OF_IMAGES, *(_OF_CLIPS if self.clips else ())]
        if not text and self.dataset.architecture in _WINDOWED:
            names.append(_WINDOW)
        settings: Settings = {name: getattr(self.dataset, name) for name in names if hasattr(self.dataset, name)}
        if self.clips and not text:
            settings["bucket_no_upscale"] = bool(self.selector.no_upscale)
        if text or self.family.per_clip:
            settings["further keys"] = source.further
        several = self.clips or len(source.files) > 1
        settings[_FOCUS] = self.focus.get(source.number) if several else None
        return dict(json.loads(json.dumps(settings)))

    def latents(self, source: Source) -> ItemCaches:
        """What there is of an item's latents: of a clip's video all of its files, or none."""
        # The files that serve.
        reasons = [StaleReason(Stale.MISSING)]
        good: list[tuple[CacheName, TensorFile, Note | None]] = []
        for name in self.named.get(source.stem, ()):
            header, note, why = self._read(Path(name.path), latents=True)
            why = why if header is None else self._why_latents(source, name, header, note)
            if header is not None and not why:
                good.append((name, header, note))
            reasons = why or reasons
        # Those that say what they were made from leave the others out.
        good.sort(key=lambda one: one[2] is None)
        if notes := [note for _, _, note in good if note is not None]:
            self._remember(source, notes[0].made_by, text=False)
        chosen = [(name, header) for name, header, _ in good[: len(notes) or None]]
        # One file of an image; of a video each clip that was made of it, with each of its sections.
        if not self.clips:
            chosen = chosen[:1]
        elif chosen:
            clips = notes[0].clips if notes else sorted({name.clip for name, _ in chosen if name.clip is not None})
            have = {(name.clip, name.section): (name, header) for name, header in chosen}
            wanted = [(clip, section) for clip in clips for section in self._sections(clip[1])]
            chosen = [have[one] for one in wanted] if all(one in have for one in wanted) else []
        files = tuple(os.path.basename(name.path) for name, _ in chosen)
        return ItemCaches(files, latents=tuple(chosen)) if chosen else ItemCaches(reasons=tuple(reasons))

    def _sections(self, frames: int) -> Iterable[int | None]:
        """The files of a clip of so many frames."""
        window = int(getattr(self.dataset, _WINDOW, 9))
        return range(max(1, (frames - 1) // 4 // window)) if self.family.in_sections else [None]

    def _why_latents(self, source: Source, name: CacheName, header: TensorFile, note: Note | None) -> list[StaleReason]:
        bucket = self.selector.get_bucket_resolution(name.size)
        if self.clips and bucket != name.size:  # the size is that of the resized frames, and a bucket's is its own
            return [_other_bucket(name.size, bucket)]
        cropped_to, focus = None if self.clips else bucket, self.focus.get(source.number)
        if note is None or note.fingerprint is None:
            why = self._why_unmarked_clip if self.clips else self._why_unmarked_image
            if reasons := why(source, name, header, bucket):
                return reasons
            # a file that does not say what it was made from is supposed to be cropped in the middle
            middle, wanted = (fingerprint_of((0, 0, ""), name.size, cropped_to, "", "", one) for one in (None, focus))
            reasons = why_stale(middle, wanted)
            reasons += _why_set_otherwise({_FOCUS: None}, self.settings_of(source, text=False))
            return reasons or _why_older(name.path, source.files)
        stored = note.fingerprint
        if min(bucket) < 1:
            return [_other_bucket(stored.bucket_size, bucket)]
        wanted = fingerprint_of(stored.source, name.size, cropped_to, stored.vae, stored.dtype, focus)
        reasons = why_changed(source.files, note.files, self._occasion)
        reasons += why_stale(stored, wanted, ignoring=(Stale.SOURCE, Stale.DTYPE, Stale.VAE))
        reasons += _why_set_otherwise(_IMPLIED_DEFAULTS | note.settings, self.settings_of(source, text=False))
        return reasons + why_made_otherwise(note.made_by, self.made_by, text=False)

    def _why_unmarked_image(
        self, source: Source, name: CacheName, header: TensorFile, bucket: tuple[int, int]
    ) -> list[StaleReason]:
        """Of an image of another size, or of another bucket."""
        from PIL import Image

        try:
            with open_input(source.files[0]) as file, Image.open(file) as image:
                size = image.size
        except Exception:  # what it is of cannot be read, which is said elsewhere
            return []
        if size != name.size:
            return [StaleReason(Stale.IMAGE_SIZE, *name.size, *size)]
        return self._why_other_bucket(header, bucket)

    def _why_unmarked_clip(
        self, source: Source, name: CacheName, header: TensorFile, bucket: tuple[int, int]
    ) -> list[StaleReason]:
        """Of another bucket, or a clip that the dataset's settings do not make."""
        if self.selector.no_upscale:  # then a clip's bucket depends on its size in the file
            from kohya_bucket.images.clips import read_clips

            width, height = read_clips(source.files[:1], first=True).sizes[0].tolist()
            bucket = self.selector.get_bucket_resolution((width, height)) if min(width, height) > 0 else (0, 0)
            if bucket != name.size:
                return [_other_bucket(name.size, bucket)]
        if name.clip is not None:
            data: Any = self.dataset
            first, frames = name.clip
            steps = {"head": 1 << 30, "chunk": max(1, frames), "slide": max(1, data.frame_stride or 1)}
            fits = frames in (data.target_frames or ()) and first % steps.get(data.frame_extraction, 1) == 0
            if data.frame_extraction == "full":
                fits = first == 0 and frames <= data.max_frames
            if not fits:
                return [StaleReason(Stale.CLIP, frames, first)]
        return self._why_other_bucket(header, bucket)

    def _why_other_bucket(self, header: TensorFile, bucket: tuple[int, int]) -> list[StaleReason]:
        """By the names of the tensors, which hold the size of the latents that are trained."""
        main_tensor = next(filter(None, map(_MAIN.match, header.shapes)), None)
        if main_tensor is None:
            return [StaleReason(Stale.PART, "latents")]
        width, height, grown = int(main_tensor[2]), int(main_tensor[1]), self.family.grown_to
        stride = self.family.stride or max(bucket[0] // max(width, 1), 1)
        size = width * stride, height * stride
        fitting = (bucket, [-(-side // grown) * grown for side in bucket])
        good = any(size == tuple(side // stride * stride for side in sides) for sides in fitting)
        return [] if good else [_other_bucket(size, bucket)]

    def text(
        self, source: Source, caption: str, begin: str = "", clips: Sequence[tuple[int, int]] | None = None
    ) -> ItemCaches:
        """What there is of a caption's outputs; with `begin`, only that pass of several is asked for.

        Where each clip has its own, all of `clips` must have them; of those that the files themselves name, where
        the clips are not listed anywhere.
        """
        reasons = [StaleReason(Stale.MISSING)]
        good: dict[tuple[int, int] | None, Note | None] = {}
        for clip in self._texts_of_clips.get(source.stem, ()) if self.per_clip else [None]:
            why, note = self._why_text(source, self.text_path(source, clip), caption, begin)
            reasons = why or reasons
            if not why:
                good[clip] = note
        wanted: Sequence[tuple[int, int] | None] = [None]
        if self.per_clip:
            named = [note.clips for note in good.values() if note is not None]
            every = named[0] if named else sorted(clip for clip in good if clip is not None)
            wanted = every if clips is None else clips
        if not wanted or any(clip not in good for clip in wanted):
            return ItemCaches(reasons=tuple(reasons))
        return ItemCaches(tuple(self.text_path(source, clip).name for clip in wanted))

    def _why_text(self, source: Source, path: Path, caption: str, begin: str) -> tuple[list[StaleReason], Note | None]:
        """Why a file does not serve, and its note."""
        header, note, why = self._read(path, latents=False)
        if header is None:
            return why, None
        if header.texts.get("caption1", caption) != caption:
            return [StaleReason(Stale.CAPTION)], None
        for start in (begin,) if begin else self.family.passes or ():
            if not any(name.startswith(start) for name in header.shapes):
                return [StaleReason(Stale.PART, start.rstrip("_"))], None
        if self.repair:  # outputs are of the repaired encoder if they say so, or are not older than its code
            since = self.repair.file.stat().st_mtime_ns
            before = path.stat().st_mtime_ns < since if note is None else REPAIRED not in note.made_by
            if before:
                return [
                    StaleReason(Stale.OPTION, "musubi-tuner's text encoder", self.repair.before, "repaired since")
                ], note
        if note is None:
            seen = source.files if self.family.sees_controls and len(source.files) > 1 else ()
            moved = _why_set_otherwise({_FOCUS: None}, self.settings_of(source, text=True))
            return moved or _why_older(str(path), seen), None
        reasons = why_changed(source.files, note.files, self._occasion) if note.files else []
        reasons += _why_set_otherwise(_IMPLIED_DEFAULTS | note.settings, self.settings_of(source, text=True))
        reasons += why_made_otherwise(note.made_by, self.made_by, text=True)
        if not reasons:
            self._remember(source, note.made_by, text=True)
        return reasons, note

    def _read(self, path: Path, *, latents: bool) -> tuple[TensorFile | None, Note | None, list[StaleReason]]:
        """A file and its note, or why it does not serve; what has a note was looked at before it was written."""
        try:
            file = read_tensor_file(path)
            note = Note.in_file(file, latents=latents)
            if note is None and self.values:
                with reading(path), open_input(path) as opened:
                    if name := not_finite(opened):
                        return None, None, [StaleReason(Stale.NOT_FINITE, name)]
        except FileNotFoundError:
            return None, None, [StaleReason(Stale.MISSING)]
        except BrokenFileError as error:
            return None, None, [StaleReason(Stale.BROKEN, error)]
        return file, note, []

    def _remember(self, source: Source, made: MadeBy, *, text: bool) -> None:
        self.makers[text].setdefault(json.dumps(made, sort_keys=True), (made, []))[1].append(source.number)


_MAIN = re.compile(r"latents_(?:\d+x)?(\d+)x(\d+)_")


def _other_bucket(before: tuple[int, int], now: tuple[int, int]) -> StaleReason:
    return StaleReason(Stale.BUCKET, "x".join(map(str, before)), "x".join(map(str, now)))


def _why_older(path: str, files: Iterable[str]) -> list[StaleReason]:
    return [StaleReason(Stale.OLDER)] if any(changed_since(file, path) for file in files) else []


def _why_set_otherwise(stored: Settings, wanted: Settings) -> list[StaleReason]:
    keys = sorted(stored.keys() & wanted.keys())
    changed = [(key, stored[key], wanted[key]) for key in keys if stored[key] != wanted[key]]
    return [
        StaleReason(Stale.FOCUS, *of) if key == _FOCUS else StaleReason(Stale.OPTION, key, *of) for key, *of in changed
    ]


def why_changed(files: tuple[str, ...], stored: list[Identity], occasion: Hashable = None) -> list[StaleReason]:
    """Reasons why the files are not those that something was made from.

    A file that is gone does not count: caches outlive it.
    """
    if len(files) != len(stored):
        return [StaleReason(Stale.SOURCE, f"{len(stored)} -> {len(files)} files")]
    reasons = []
    for path, stored_identity in zip(files, stored, strict=True):
        with suppress(FileNotFoundError), reading(path):
            folder = os.path.isdir(path)
            now = identity(path, content=not folder and stamp_is_shared(path, occasion))
            if folder and now[0] == stored_identity[0] and now[1] != stored_identity[1]:
                now = identity(path, content=True)
            reasons += why_other_source(stored_identity, now, None if folder else Path(path))
    return list(dict.fromkeys(reasons))
