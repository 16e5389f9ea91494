"""Reading what a command line names, and datasets of its folders."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.cli.console import say, scan_progress
from kohya_bucket.cli.options import RuleArguments
from kohya_bucket.cli.sources import images_in, not_read, size_table_in, tars_in
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import pip_install
from kohya_bucket.images import MetadataCache, read_sizes
from kohya_bucket.images.clips import read_clips
from kohya_bucket.images.formats import CAPTION_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS, is_video
from kohya_bucket.images.listing import absolute_paths, are_there
from kohya_bucket.images.parallel import Engine, Progress
from kohya_bucket.images.pixels import decode_all
from kohya_bucket.images.remote import is_url
from kohya_bucket.images.size_table import read_named_sizes
from kohya_bucket.texts import counted
from kohya_bucket.trainers.door.captions import check_broken, check_missing, read_captions
from kohya_bucket.trainers.door.file_findings import note_subfolders
from kohya_bucket.trainers.door.findings import Finding, Findings, Teller
from kohya_bucket.trainers.door.programs import Programs
from kohya_bucket.trainers.door.subject import DEEP, TRANSPARENT, ClipFacts, ImageTable, Subject


class Terminal(Teller):
    """Tells who sits at the terminal."""

    def progress(self, title: str) -> AbstractContextManager[Progress | None]:
        return scan_progress(title)

    def say(self, line: str) -> None:
        say(line, err=True)


@dataclass(frozen=True)
class Reading(Terminal):
    """How images are read: the options that every source shares."""

    recursive: bool = True
    hash: bool = False
    cache: Path | None = None
    workers: int | None = None
    quiet: bool = False
    engine: Engine = "auto"
    decode: bool = False

    def progress(self, title: str) -> AbstractContextManager[Progress | None]:
        return scan_progress(title, quiet=self.quiet)

    def table(self, paths: Sequence[str]) -> ImageTable:
        """The headers of `paths`, from the cache where it knows them."""
        before = MetadataCache.load(self.cache) if self.cache is not None and self.cache.exists() else MetadataCache()
        with self.progress("reading headers") as progress:
            how: dict[str, Any] = {"workers": self.workers, "engine": self.engine, "progress": progress}
            if self.cache is None and not self.hash:
                return ImageTable.from_scan(read_sizes(absolute_paths(paths), **how))
            scanned = before.refresh(paths, hash=self.hash, **how)
        if self.cache is not None:
            _with_others_of(before, scanned).save(self.cache)
        hashes = scanned.hashes.astype(str).tolist() if self.hash and scanned.hashes is not None else None
        return ImageTable.from_scan(scanned.scan(), hashes)

    def clips(self, paths: Sequence[str]) -> tuple[ClipFacts, ImageTable]:
        """What is known of clips, and their frames as images."""
        paths = absolute_paths(paths)
        with self.progress("reading clips") as progress:
            how: dict[str, Any] = {"workers": self.workers, "engine": self.engine, "progress": progress}
            scan = read_clips(paths, decode=self.decode, first=True, **how)
        return ClipFacts(scan), ImageTable.sized(paths, scan.sizes, failures={i: why for i, _, why in scan.failures})

    def decoded(self, images: ImageTable) -> ImageTable:
        """The same with what their pixels show, where they are to be decoded."""
        if not self.decode:
            return images
        with self.progress("decoding") as progress:
            decoded = decode_all([images.paths[i] for i in np.flatnonzero(images.readable).tolist()], progress)
        read_as = dict.fromkeys(decoded.transparent, TRANSPARENT) | dict.fromkeys(decoded.deep, DEEP)
        misread = {i: read_as[path] for i, path in enumerate(images.paths) if path in read_as}
        return replace(images.without(decoded.broken), misread=misread)


def _with_others_of(before: MetadataCache, scanned: MetadataCache) -> MetadataCache:
    """What was scanned, and the rows of all other files that the cache had: those of other folders or datasets."""
    others = before.where(scanned.paths.find(before.paths) < 0)
    if scanned.hashes is not None and others.hashes is None:
        others = replace(others, hashes=np.zeros(len(others), scanned.hashes.dtype))
    return others.joined(scanned)


def look_at_captions(sources: Sequence[str], paths: Sequence[str], reading: Reading) -> Findings:
    """What stops or spoils a training of images and is not in them: subfolders, and the captions beside them."""
    findings, folders = Findings(), {os.path.abspath(source) for source in sources if os.path.isdir(source)}  # noqa: PTH100, PTH112
    paths = [path for path in paths if not is_url(path)]
    below = [path for path in paths if os.path.dirname(os.path.abspath(path)) not in folders]  # noqa: PTH100, PTH120
    if folders and len(below) < len(paths):
        note_subfolders(below, "a trainer", "", "dataset", findings)
    stems = [os.path.splitext(path)[0] for path in paths]  # noqa: PTH122
    there = {ending: are_there(stem + ending for stem in stems) for ending in CAPTION_EXTENSIONS}
    ending = max(CAPTION_EXTENSIONS, key=lambda one: sum(there[one]))
    with reading.progress("reading captions"):
        captions = [stem + ending for stem, has_one in zip(stems, there[ending], strict=True) if has_one]
        check_broken(read_captions(captions)[1], "a trainer", "", findings)
    bare = [path for path, has_one in zip(paths, there[ending], strict=True) if not has_one]
    check_missing(bare, len(paths), ending, "an empty caption is trained", "", findings, key="")
    return findings


def from_folders(
    sources: list[str], options: RuleArguments, batch_size: int, reading: Reading, programs: Programs
) -> tuple[list[Subject], list[Finding]]:
    """One dataset of all images that `sources` name, and one of all clips; and what is beside them."""
    if not sources:
        raise ConfigError("nothing to analyse: name a folder, e.g. kohya-bucket analyze data/, or give --config")
    options.check()
    name = ", ".join(Path(source).name or Path(source).resolve().name for source in sources)
    origin = "" if options.name == "kohya" else options.name.replace(":", " ", 1)

    def subject(name: str, images: ImageTable, clips: ClipFacts | None = None) -> Subject:
        return Subject(name, images, options.make(images.sizes), batch_size, origin, programs, clips)

    more = {"hash": reading.hash, "decode": reading.decode, "cache": reading.cache is not None}
    if (tars := tars_in(sources, None, reading.engine, **more)) is not None:
        orientation = tars.rows["orientation"].astype(np.uint8)
        names = [tars.name(i) for i in range(len(tars))]
        images = ImageTable.sized(names, tars.sizes, orientation=orientation, failures=tars.reasons, captions=())
        return [subject(name, images)], []
    if (table := size_table_in(sources, **more)) is not None:
        names, sizes = read_named_sizes(table)
        sized = sizes.min(axis=1, initial=1) > 0
        if without := len(names) - int(sized.sum()):
            say(f"{counted(without, 'image')} of {table} left out: without a size", err=True)
        return [subject(name, ImageTable.sized(names, sizes, captions=()).take(np.flatnonzero(sized)))], []
    paths = images_in(sources, recursive=reading.recursive, extensions=IMAGE_EXTENSIONS | VIDEO_EXTENSIONS)
    clips = list(filter(is_video, paths))
    if clips:
        paths = [path for path in paths if not is_video(path)]
    subjects, findings = list[Subject](), list[Finding]()
    if paths:
        findings += look_at_captions(sources, paths, reading)
        images = reading.table(paths)
        subjects.append(subject(name, reading.decoded(images.without_unlisted(not_read(images.paths)))))
    if clips and paths and importlib.util.find_spec("av") is None:
        say(f"{counted(len(clips), 'clip')} left out: PyAV, which reads them, is not installed: {pip_install('video')}",
            err=True)  # fmt: skip
    elif clips:
        facts, images = reading.clips(clips)
        subjects.append(subject(f"{name}, clips", images, facts))
    return subjects, findings
