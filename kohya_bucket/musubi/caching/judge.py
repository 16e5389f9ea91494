"""Which caches of a data set serve, and why others do not."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kohya_bucket.errors import ConfigError
from kohya_bucket.files import final_name, remove_leftovers
from kohya_bucket.images.clips import read_clips
from kohya_bucket.latents.fingerprint import UNKNOWN_VAE, Fingerprint, Reason, Stale, why_stale
from kohya_bucket.musubi.architectures import ARCHITECTURES, Architecture
from kohya_bucket.musubi.caching.files import (
    REPAIRED,
    BrokenFileError,
    LatentsNote,
    Settings,
    TensorFile,
    TextNote,
    read_latents_note,
    read_tensor_file,
    read_text_note,
)
from kohya_bucket.musubi.caching.made_by import MadeBy, why_made_otherwise
from kohya_bucket.musubi.caching.sources import CacheName, Identity, Source, clip_of_text, identity, table_of
from kohya_bucket.musubi.checkout import repaired_encoder
from kohya_bucket.musubi.objects import CachedDataset, Selector

__all__ = ["Caches", "fingerprint_of_clip", "fingerprint_of_image", "holds_clips"]

_SETTINGS = (
    "multiple_target", "no_resize_control", "control_resolution", "flux_kontext_no_resize_control",
    "qwen_image_edit_no_resize_control", "qwen_image_edit_control_resolution", "fp_1f_clean_indices",
    "fp_1f_target_index", "fp_1f_no_post",
)  # fmt: skip
_OF_CLIPS = (
    "resolution", "frame_extraction", "frame_stride", "frame_sample", "target_frames", "max_frames", "source_fps",
)  # fmt: skip
UNSAID: Settings = {"bucket_no_upscale": False, "further keys": ""}
"""What notes did not say while nothing else was possible."""
_WINDOW, _WINDOWED = "fp_latent_window_size", ("fp", "wan")


def holds_clips(dataset: CachedDataset) -> bool:
    """Whether a data set is of videos."""
    return hasattr(dataset, "frame_extraction")


def settings_of(dataset: CachedDataset, selector: Selector) -> Settings:
    """Keys of the config that decide what is encoded, with their values as JSON has them.

    The resolution of images is not among them: it decides their buckets, and those are compared.
    """
    names = (*_SETTINGS, *(_OF_CLIPS if holds_clips(dataset) else ()))
    names += (_WINDOW,) if dataset.architecture in _WINDOWED else ()
    given: dict[str, Any] = {name: getattr(dataset, name) for name in names if hasattr(dataset, name)}
    if holds_clips(dataset):
        given["bucket_no_upscale"] = bool(selector.no_upscale)
    return dict(json.loads(json.dumps(given)))


def settings_of_text(dataset: CachedDataset, further: str) -> Settings:
    """The same for outputs of a text encoder that sees images: in its size, and with further keys of the line."""
    names = (
        "resolution",
        "enable_bucket",
        "bucket_no_upscale",
        *_SETTINGS,
        *(_OF_CLIPS if holds_clips(dataset) else ()),
    )
    given: dict[str, Any] = {name: getattr(dataset, name) for name in names if hasattr(dataset, name)}
    return dict(json.loads(json.dumps(given | {"further keys": further})))


def fingerprint_of_image(
    source: Identity, size: tuple[int, int], bucket: tuple[int, int], vae: str, dtype: str
) -> Fingerprint:
    """Resized to cover the bucket and cut out of the middle, as `resize_image_to_bucket` of musubi-tuner does."""
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    resized = int(size[0] * scale + 0.5), int(size[1] * scale + 0.5)
    interpolation = "lanczos/pillow" if scale > 1 else "area/cv2"
    if size == bucket:
        resized, interpolation = size, "none"
    crop = (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2
    return Fingerprint(*source, vae or UNKNOWN_VAE, bucket, resized, crop, interpolation, dtype)


def fingerprint_of_clip(source: Identity, size: tuple[int, int], vae: str, dtype: str) -> Fingerprint:
    """Frames are resized while they are read, and their own size is not kept: the settings decide it."""
    return Fingerprint(*source, vae or UNKNOWN_VAE, size, size, (0, 0), "none", dtype)


_MAIN = re.compile(r"latents_(?:\d+x)?(\d+)x(\d+)_")


def latent_size(header: TensorFile) -> tuple[int, int] | None:
    """(width, height) of the latents that are trained, by their name."""
    found = next(filter(None, map(_MAIN.match, header.shapes)), None)
    return None if found is None else (int(found[2]), int(found[1]))


def why_unmarked_image(
    family: Architecture, files: Iterable[str], name: CacheName, header: TensorFile, bucket: tuple[int, int]
) -> list[Reason]:
    """Older than a file that it is made from, of an image of another size, or of another bucket."""
    from PIL import Image

    files = tuple(files)
    try:
        with Image.open(files[0]) as image:
            if image.size != name.size:
                return [Reason(Stale.IMAGE_SIZE, *name.size, *image.size)]
    except Exception:  # what it is of cannot be read, which is said elsewhere
        return _why_older(name.path, files)
    return _why_other_bucket(family, header, bucket) or _why_older(name.path, files)


def why_unmarked_clip(
    dataset: CachedDataset,
    selector: Selector,
    family: Architecture,
    files: Iterable[str],
    name: CacheName,
    header: TensorFile,
) -> list[Reason]:
    """As `why_unmarked_image`, or a clip that the data set's settings do not make."""
    bucket = _bucket_of_clip(next(iter(files)), selector) if selector.no_upscale else name.size
    if bucket != name.size:
        return [Reason(Stale.BUCKET, "x".join(map(str, name.size)), "x".join(map(str, bucket)))]
    wanted = [] if name.clip is None else _why_no_such_clip(dataset, *name.clip)
    return wanted or _why_other_bucket(family, header, name.size) or _why_older(name.path, files)


def _bucket_of_clip(file: str, selector: Selector) -> tuple[int, int]:
    """Where the frames of a clip go by their size in the file; none if it cannot be read."""
    width, height = read_clips([file]).sizes[0].tolist()
    return selector.get_bucket_resolution((width, height)) if min(width, height) > 0 else (0, 0)


def why_unmarked_text(path: Path, seen: Iterable[str]) -> list[Reason]:
    """Older than an image that the encoder saw; the caption is compared by its text."""
    return _why_older(str(path), seen)


def _why_no_such_clip(dataset: Any, first: int, frames: int) -> list[Reason]:
    how = dataset.frame_extraction
    if how == "full":
        fits = first == 0 and frames <= dataset.max_frames
    else:
        steps = {"head": 1 << 30, "chunk": max(1, frames), "slide": max(1, dataset.frame_stride or 1)}
        fits = frames in (dataset.target_frames or ()) and first % steps.get(how, 1) == 0
    return [] if fits else [Reason(Stale.CLIP, frames, first)]


def _why_other_bucket(family: Architecture, header: TensorFile, bucket: tuple[int, int]) -> list[Reason]:
    latents = latent_size(header)
    if latents is None:
        return [Reason(Stale.PART, "latents")]
    stride, grown = family.stride, family.grown_to
    sizes = [bucket, tuple(-(-side // grown) * grown for side in bucket)]
    if latents in [(size[0] // stride, size[1] // stride) for size in sizes]:
        return []
    return [Reason(Stale.BUCKET, f"{latents[0] * stride}x{latents[1] * stride}", f"{bucket[0]}x{bucket[1]}")]


def _why_older(path: str, files: Iterable[str]) -> list[Reason]:
    made = os.stat(path).st_mtime_ns
    for file in files:
        try:
            if os.stat(file).st_mtime_ns > made:
                return [Reason(Stale.OLDER)]
        except OSError:
            continue
    return []


_NOT_GEOMETRY = (Stale.SOURCE, Stale.DTYPE, Stale.VAE)


@dataclass(frozen=True)
class Found:
    """What there is of one item.

    Attributes:
        files: those that can be trained.
        headers: of these.
        reasons: why there are none.
    """

    files: tuple[CacheName, ...] = ()
    headers: tuple[TensorFile, ...] = ()
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class FoundText:
    """What there is of a caption's outputs.

    Attributes:
        files: their names, if they can be trained.
        reasons: why they cannot.
    """

    files: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()


@dataclass
class Caches:
    """The cache folder of one data set, as it is now.

    Attributes:
        dataset: of a family that is known.
        selector: gives its buckets.
        made_by: models and options that are asked for; empty where nobody knows them: they are not compared.
        package: the trainer's code; None where nobody knows it.
        makers: those of what was found to serve, with the items' numbers: of latents (False) and of captions (True).
    """

    dataset: CachedDataset
    selector: Selector
    made_by: MadeBy = field(default_factory=dict)
    package: Path | None = None

    def __post_init__(self) -> None:
        if not self.dataset.cache_directory:
            raise ConfigError(
                "a data set of a list has no cache_directory, and there is no folder to take for it: set one"
            )
        self.family: Architecture = ARCHITECTURES[self.dataset.architecture]
        self.clips = holds_clips(self.dataset)
        self.per_clip = self.clips and self.family.per_clip
        self.settings = settings_of(self.dataset, self.selector)
        self.repair = repaired_encoder(self.package, self.dataset.architecture)
        self.table = table_of(self.dataset)
        self.makers: dict[bool, dict[str, tuple[MadeBy, list[int]]]] = {False: {}, True: {}}
        self.named: dict[str, list[CacheName]] = defaultdict(list)
        self.texts: list[str] = []
        self.texts_of_clips: dict[str, list[tuple[int, int]]] = defaultdict(list)
        folder, name = self.dataset.cache_directory, self.dataset.architecture
        killed = []
        for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            if f"_{name}" in (final := final_name(file)):
                killed.append(Path(folder, final))
            elif file.endswith(f"_{name}_te.safetensors"):
                self.texts.append(file)
                of_clip = clip_of_text(file, name) if self.per_clip else None
                if of_clip is not None:
                    self.texts_of_clips[of_clip[0]].append(of_clip[1])
            elif file.endswith(f"_{name}.safetensors"):
                found = CacheName.of(os.path.join(folder, file), name, clips=self.clips)
                if found is not None:
                    self.named[found.stem].append(found)
        remove_leftovers(killed)

    def text_path(self, source: Source, clip: tuple[int, int] | None = None) -> Path:
        """Where a caption's outputs are, or those of one clip."""
        of_clip = "" if clip is None else f"_{clip[0]:05d}-{clip[1]:03d}"
        return Path(self.dataset.cache_directory, f"{source.stem}{of_clip}_{self.dataset.architecture}_te.safetensors")

    def settings_of(self, source: Source) -> Settings:
        """The settings that an item's latents depend on."""
        return self.settings | ({"further keys": source.further} if self.family.per_clip else {})

    def settings_of_text(self, source: Source) -> Settings:
        """The settings that a caption's outputs depend on."""
        return settings_of_text(self.dataset, source.further) if self.family.sees_controls else {}

    def latents(self, source: Source) -> Found:
        """What there is of an item's latents."""
        reasons = [Reason(Stale.MISSING)]
        good: list[tuple[CacheName, TensorFile, LatentsNote | None]] = []
        for name in self.named.get(source.stem, ()):
            try:
                header = read_tensor_file(Path(name.path))
            except FileNotFoundError:
                continue
            except BrokenFileError as error:
                reasons = [Reason(Stale.BROKEN, error)]
                continue
            note = read_latents_note(header)
            why = self._why_latents(source, name, header, note)
            if why:
                reasons = why
            else:
                good.append((name, header, note))
        good.sort(key=lambda one: one[2] is None)
        if good and good[0][2] is not None:
            self._remember(source, good[0][2].made_by, text=False)
        if self.clips:
            return self._all_clips(source, good, reasons)
        return Found((good[0][0],), (good[0][1],)) if good else Found(reasons=tuple(reasons))

    def text(
        self, source: Source, caption: str, begin: str = "", clips: Sequence[tuple[int, int]] | None = None
    ) -> FoundText:
        """What there is of a caption's outputs; with `begin`, only that pass of several is asked for.

        Where each clip has its own, all of `clips` must have them; of those that the files themselves name, where
        nobody says which clips there are.
        """
        if not self.per_clip:
            reasons = self._why_text(source, self.text_path(source), caption, begin)
            return FoundText(() if reasons else (self.text_path(source).name,), tuple(reasons))
        reasons = [Reason(Stale.MISSING)]
        good: dict[tuple[int, int], TextNote | None] = {}
        for clip in self.texts_of_clips.get(source.stem, ()):
            why = self._why_text(source, self.text_path(source, clip), caption, begin)
            reasons = why or reasons
            if not why:
                good[clip] = read_text_note(read_tensor_file(self.text_path(source, clip)))
        named = [note.clips for note in good.values() if note is not None]
        wanted = clips if clips is not None else named[0] if named else sorted(good)
        if not wanted or any(clip not in good for clip in wanted):
            return FoundText(reasons=tuple(reasons))
        return FoundText(tuple(self.text_path(source, clip).name for clip in wanted))

    def _why_text(self, source: Source, path: Path, caption: str, begin: str) -> list[Reason]:
        try:
            header = read_tensor_file(path)
        except FileNotFoundError:
            return [Reason(Stale.MISSING)]
        except BrokenFileError as error:
            return [Reason(Stale.BROKEN, error)]
        if header.texts.get("caption1", caption) != caption:
            return [Reason(Stale.CAPTION)]
        for start in (begin,) if begin else self.family.passes:
            if not any(name.startswith(start) for name in header.shapes):
                return [Reason(Stale.PART, start.rstrip("_"))]
        note = read_text_note(header)
        if self.repair and not self._repaired(path, note):
            return [Reason(Stale.OPTION, "musubi-tuner's text encoder", self.repair.before, "repaired since")]
        if note is None:
            seen = source.files if self.family.sees_controls and len(source.files) > 1 else ()
            return why_unmarked_text(path, seen)
        blank = Fingerprint(0, 0, "", "", (1, 1), (1, 1), (0, 0), "", "")
        reasons = why_changed(source.files, note.seen, blank) if note.seen else []
        reasons += _why_set_otherwise(note.settings, self.settings_of_text(source))
        reasons += why_made_otherwise(note.made_by, self.made_by, text=True)
        if not reasons:
            self._remember(source, note.made_by, text=True)
        return reasons

    def _repaired(self, path: Path, note: TextNote | None) -> bool:
        """Outputs are of the repaired encoder: they say so, or they are not older than the code that has the repair."""
        if note is None and self.repair:
            return path.stat().st_mtime_ns >= self.repair.file.stat().st_mtime_ns
        return note is not None and REPAIRED in note.made_by

    def _remember(self, source: Source, made: MadeBy, *, text: bool) -> None:
        """For `makers`: by whom what serves was made, and of which items."""
        self.makers[text].setdefault(json.dumps(made, sort_keys=True), (made, []))[1].append(source.number)

    def _why_latents(
        self, source: Source, name: CacheName, header: TensorFile, note: LatentsNote | None
    ) -> list[Reason]:
        bucket = self.selector.get_bucket_resolution(name.size)
        if self.clips and bucket != name.size:  # the size is that of the resized frames, and a bucket's is its own
            return [Reason(Stale.BUCKET, "x".join(map(str, name.size)), "x".join(map(str, bucket)))]
        if note is None and self.clips:
            return why_unmarked_clip(self.dataset, self.selector, self.family, source.files, name, header)
        if note is None:
            return why_unmarked_image(self.family, source.files, name, header, bucket)
        stored = note.fingerprint
        reasons = why_changed(source.files, [_of(stored), *note.further], stored)
        if min(bucket) < 1:
            return [Reason(Stale.BUCKET, "x".join(map(str, stored.bucket_size)), "x".join(map(str, bucket)))]
        if self.clips:
            wanted = fingerprint_of_clip(_of(stored), name.size, stored.vae, stored.dtype)
        else:
            wanted = fingerprint_of_image(_of(stored), name.size, bucket, stored.vae, stored.dtype)
        reasons += why_stale(stored, wanted, ignoring=_NOT_GEOMETRY)
        reasons += _why_set_otherwise(UNSAID | note.settings, self.settings_of(source))
        return reasons + why_made_otherwise(note.made_by, self.made_by, text=False)

    def _all_clips(
        self, source: Source, good: list[tuple[CacheName, TensorFile, LatentsNote | None]], reasons: list[Reason]
    ) -> Found:
        """Those of a video, if all that there should be are there."""
        marked = [(name, header) for name, header, note in good if note is not None]
        chosen = marked or [(name, header) for name, header, _ in good]
        notes = [note for _, _, note in good if note is not None]
        clips = notes[0].clips if notes else sorted({name.clip for name, _ in chosen if name.clip is not None})
        wanted = [(clip, section) for clip in clips for section in self._sections(clip[1])]
        have = {(name.clip, name.section): (name, header) for name, header in chosen}
        if not wanted or any(one not in have for one in wanted):
            return Found(reasons=tuple(reasons))
        return Found(tuple(have[one][0] for one in wanted), tuple(have[one][1] for one in wanted))

    def _sections(self, frames: int) -> list[int | None]:
        if not ARCHITECTURES[self.dataset.architecture].in_sections:
            return [None]
        window: Any = getattr(self.dataset, "fp_latent_window_size", 9)
        return list(range(max(1, (frames - 1) // 4 // int(window))))


def _why_set_otherwise(known: Settings, wanted: Settings) -> list[Reason]:
    keys = sorted(known.keys() & wanted.keys())
    return [Reason(Stale.OPTION, key, known[key], wanted[key]) for key in keys if known[key] != wanted[key]]


def why_changed(files: tuple[str, ...], stored: list[Identity], like: Fingerprint) -> list[Reason]:
    """Reasons why the files are not those that something was made from.

    A file that is gone is no reason: caches outlive it.
    """
    if len(files) != len(stored):
        return [Reason(Stale.SOURCE, f"{len(stored)} -> {len(files)} files")]
    reasons = []
    for path, known in zip(files, stored, strict=True):
        try:
            now = identity(path)
            if os.path.isdir(path) and now[0] == known[0] and now[1] != known[1]:
                now = identity(path, content=True)
            source = None if os.path.isdir(path) else Path(path)
            reasons += why_stale(_with(like, known), _with(like, now), source)
        except OSError:
            continue
    return list(dict.fromkeys(reasons))


def _of(print_: Fingerprint) -> Identity:
    return print_.source_bytes, print_.source_mtime_ns, print_.source_hash


def _with(print_: Fingerprint, source: Identity) -> Fingerprint:
    return replace(print_, source_bytes=source[0], source_mtime_ns=source[1], source_hash=source[2])
