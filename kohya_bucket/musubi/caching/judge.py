"""Which caches of a data set serve, and why others do not."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kohya_bucket.errors import ConfigError
from kohya_bucket.files import TEMPORARY_SUFFIX, remove_leftovers
from kohya_bucket.latents.fingerprint import Fingerprint, why_stale
from kohya_bucket.latents.stale import Reason, Stale
from kohya_bucket.musubi.architectures import ARCHITECTURES
from kohya_bucket.musubi.caching.families import FAMILIES, Family
from kohya_bucket.musubi.caching.geometry import (
    UNSAID,
    fingerprint_of_clip,
    fingerprint_of_image,
    holds_clips,
    settings_of,
    settings_of_text,
)
from kohya_bucket.musubi.caching.made_by import MadeBy, why_made_otherwise
from kohya_bucket.musubi.caching.names import CacheName, clip_of_text
from kohya_bucket.musubi.caching.note import (
    REPAIRED,
    LatentsNote,
    Settings,
    TextNote,
    read_latents_note,
    read_text_note,
)
from kohya_bucket.musubi.caching.sources import Identity, Source, identity, table_of
from kohya_bucket.musubi.caching.tensor_file import BrokenFileError, TensorFile, read_tensor_file
from kohya_bucket.musubi.caching.unmarked import why_unmarked_clip, why_unmarked_image, why_unmarked_text
from kohya_bucket.musubi.checkout import repaired_encoder
from kohya_bucket.musubi.objects import CachedDataset, Selector

__all__ = ["Caches", "Found", "FoundText"]

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
        self.family: Family = FAMILIES[self.dataset.architecture]
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
            if file.startswith(".") and file.endswith(TEMPORARY_SUFFIX) and f"_{name}" in file:
                killed.append(Path(folder, file[1:].rsplit(".", 2)[0]))
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
