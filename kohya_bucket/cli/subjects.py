"""From what a command line names to datasets with their rules: folders with options, or a dataset config."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.cli.configs import adapter_options, musubi_config
from kohya_bucket.cli.console import say, scan_progress
from kohya_bucket.cli.options import RuleArguments
from kohya_bucket.cli.sources import images_in, not_read, tars_in
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import argument, pip_install
from kohya_bucket.images import MetadataCache, SizeScan, read_sizes
from kohya_bucket.images.clips import read_clips
from kohya_bucket.images.formats import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS, is_video
from kohya_bucket.images.listing import absolute_paths
from kohya_bucket.images.parallel import Engine
from kohya_bucket.images.pixels import decode_all
from kohya_bucket.reports.subject import DEEP, TRANSPARENT, ClipFacts, Epoch, ImageTable, Subject
from kohya_bucket.texts import counted
from kohya_bucket.trainers.ai_toolkit.config import read_job
from kohya_bucket.trainers.ai_toolkit.plan import counted_sizes, files_of, rule_of
from kohya_bucket.trainers.door.dataset_keys import at_resolutions, rule_for
from kohya_bucket.trainers.door.findings import Finding, Findings, Severity, check_turned
from kohya_bucket.trainers.door.placed import InBuckets, PlacedDataset
from kohya_bucket.trainers.door.placing import focus_of
from kohya_bucket.trainers.musubi.controls import sizes_in_batch
from kohya_bucket.trainers.musubi.keys import ClipKeys
from kohya_bucket.trainers.musubi.listing import list_items
from kohya_bucket.trainers.musubi.plan import image_items, place_clips
from kohya_bucket.trainers.sdscripts.config import NEWEST, Config, ReadDataset, Release, read_config
from kohya_bucket.trainers.sdscripts.config.model import refuse_lost_focus
from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER, Trainer
from kohya_bucket.trainers.sdscripts.plan import check_limits


@dataclass(frozen=True)
class Reading:
    """How images are read: the options that every source shares."""

    recursive: bool = True
    hash: bool = False
    cache: Path | None = None
    workers: int | None = None
    quiet: bool = False
    engine: Engine = "auto"
    decode: bool = False
    trainer: Trainer = ANY_TRAINER
    release: Release = NEWEST

    def table(self, paths: Sequence[str]) -> ImageTable:
        """The headers of `paths`, from the cache where it knows them."""
        before = MetadataCache.load(self.cache) if self.cache is not None and self.cache.exists() else MetadataCache()
        with scan_progress("reading headers", quiet=self.quiet) as progress:
            how: dict[str, Any] = {"workers": self.workers, "engine": self.engine, "progress": progress}
            if self.cache is None and not self.hash:
                return ImageTable.from_scan(read_sizes(absolute_paths(paths), **how))
            known = before.refresh(paths, hash=self.hash, **how)
        if self.cache is not None:
            known.save(self.cache)
        hashes = known.hashes.astype(str).tolist() if self.hash and known.hashes is not None else None
        return ImageTable.from_scan(known.scan(), hashes)

    def clips(self, paths: Sequence[str]) -> tuple[ClipFacts, ImageTable]:
        """What is known of clips, and their frames as images."""
        with scan_progress("reading clips", quiet=self.quiet) as progress:
            scan = read_clips(paths, decode=self.decode, workers=self.workers, engine=self.engine, progress=progress)
        return ClipFacts(scan), ImageTable.of(paths, scan.sizes, failures={i: why for i, _, why in scan.failures})

    def decoded(self, images: ImageTable) -> ImageTable:
        """The same with what their pixels show, where they are to be decoded."""
        if not self.decode:
            return images
        with scan_progress("decoding", quiet=self.quiet) as progress:
            found = decode_all([images.paths[i] for i in np.flatnonzero(images.readable).tolist()], progress)
        read_as = dict.fromkeys(found.transparent, TRANSPARENT) | dict.fromkeys(found.deep, DEEP)
        misread = {i: read_as[path] for i, path in enumerate(images.paths) if path in read_as}
        return replace(images.without(found.broken), misread=misread)


def from_folders(sources: list[str], options: RuleArguments, batch_size: int, reading: Reading) -> list[Subject]:
    """One dataset of all images that `sources` name, and one of all clips."""
    if not sources:
        raise ConfigError("nothing to analyse: name a folder, e.g. kohya-bucket analyze data/, or give --config")
    name = ", ".join(Path(source).name or Path(source).resolve().name for source in sources)
    origin = "" if options.name == "kohya" else options.name.replace(":", " ", 1)

    def subject(name: str, images: ImageTable, clips: ClipFacts | None = None) -> Subject:
        return Subject(name, images, options.make(images.sizes), batch_size, origin, reading.trainer, clips)

    if (tars := tars_in(sources)) is not None:
        orientation = tars.rows["orientation"].astype(np.uint8)
        names = [tars.name(i) for i in range(len(tars))]
        images = ImageTable.of(names, tars.sizes, orientation=orientation, failures=tars.reasons, captions=())
        return [subject(name, images)]
    paths = images_in(sources, recursive=reading.recursive, extensions=IMAGE_EXTENSIONS | VIDEO_EXTENSIONS)
    clips = list(filter(is_video, paths))
    if clips:
        paths = [path for path in paths if not is_video(path)]
    subjects = []
    if paths:
        images = reading.table(paths)
        subjects.append(subject(name, reading.decoded(images.without_unlisted(not_read(images.paths)))))
    if clips and paths and importlib.util.find_spec("av") is None:
        say(f"{counted(len(clips), 'clip')} left out: PyAV, which reads them, is not installed: {pip_install('video')}",
            err=True)  # fmt: skip
    elif clips:
        facts, images = reading.clips(clips)
        subjects.append(subject(f"{name}, clips", images, facts))
    return subjects


def from_config(path: Path, batch_size: int | None, reading: Reading) -> tuple[list[Subject], list[Finding]]:
    """Every dataset of an sd-scripts dataset config that can be trained, and what is wrong with the config."""
    config, read, _ = images_of_config(path, reading)
    adapter = adapter_options(config)
    placed = []
    for dataset, images in read:
        refuse_lost_focus(dataset.config, adapter, config.release)
        batch = batch_size or dataset.config.batch_size
        known = SizeScan.stated(images.paths, images.sizes)
        placed.append(dataset.images.place(known, batch, dataset.config.dataset_keys, adapter))
    subjects = []
    for number, (dataset, images) in enumerate(read):
        focus = focus_of(adapter, images.paths)
        name = f"{path.stem}, dataset {dataset.config.number}" if len(read) > 1 else path.stem
        for at, keys in enumerate(at_resolutions(dataset.config.dataset_keys, adapter)):
            title = f"{name}, {keys.resolution[0]}x{keys.resolution[1]}" if adapter.resolutions else name
            rule, batch = rule_for(keys, adapter, images.sizes), batch_size or dataset.config.batch_size
            if adapter.rule == "kohya":
                sizes = images.sizes[images.readable]
                check_limits(keys, rule, sizes, dataset.config.place, config.trainer, config.findings)
            epoch = Epoch(tuple(placed), number, at)
            how = str(path), config.trainer, None, focus, adapter, epoch
            subjects.append(Subject(title, images, rule, batch, *how))
    return subjects, _serious(config.findings)


def images_of_config(
    path: Path, reading: Reading
) -> tuple[Config, list[tuple[ReadDataset, ImageTable]], list[Finding]]:
    """A config, its datasets that can be trained with their images, and what is wrong; `ConfigError` for none."""
    config = read_config(path, release=reading.release, trainer=reading.trainer)
    usable = [d for d in config.datasets if len(d.images) and d.config.resolution is not None]
    if not usable:
        reasons = "; ".join(f.text for f in _serious(config.findings)[:3])
        raise ConfigError(f"{path}: no dataset with images and a resolution in it: {reasons or 'see its folders'}")
    paths = list(dict.fromkeys(path for d in usable for path in d.images.paths))
    headers = reading.table(paths)
    everything = reading.decoded(headers)
    broken = {paths[i]: why for i, why in everything.failures.items() if i not in headers.failures}
    row_of = {name: i for i, name in enumerate(paths)}
    read = []
    for dataset in usable:
        images = everything.take(np.array([row_of[name] for name in dataset.images.paths], dtype=np.intp))
        stated = dataset.images.stated_sizes
        known = stated.min(axis=1, initial=1) > 0
        endings = tuple(dict.fromkeys(s.caption_extension for s in dataset.config.subsets if s.caption_extension))
        masked = [dataset.config.subsets[number - 1].alpha_mask for number in dataset.images.subset.tolist()]
        images = replace(
            images, repeats=dataset.images.repeats, captions=endings or images.captions,
            # sd-scripts trusts the sizes that metadata states
            sizes=np.where(known[:, None], stated, images.sizes).astype(np.int32),
            failures={i: why for i, why in images.failures.items() if not known[i]},
            misread={i: why for i, why in images.misread.items() if why != TRANSPARENT or not masked[i]},
        )  # fmt: skip
        check_turned(images.paths, images.orientation.tolist(), "sd-scripts", dataset.config.place, config.findings)
        read.append((dataset, images.without(broken)))
    return config, read, _serious(config.findings)


def from_musubi_config(
    path: Path, arch: str | None, batch_size: int | None, reading: Reading
) -> tuple[list[Subject], list[Finding]]:
    """The same of musubi-tuner."""
    read = musubi_config(path, arch)
    model, adapter = read.model, adapter_options(read)
    trainer = Trainer(f"{model.title} in musubi-tuner", {"musubi-tuner": model.steps})
    subjects, placed = [], list[InBuckets]()
    for number, (keys, place) in enumerate(zip(read.datasets, read.places, strict=True), 1):
        paths, controls = list_items(keys, place, read.findings, model)
        if not paths:
            continue
        name = f"{path.stem}, dataset {number}" if len(read.datasets) > 1 else path.stem
        batch = batch_size or keys.batch_size
        rule, facts, epoch = keys.picture_rule(model), None, None
        if isinstance(keys, ClipKeys):
            facts, images = reading.clips(paths)
            clips = place_clips(keys, place, paths, facts.scan, model, Findings())
            facts = replace(facts, placement=clips.clips)
            placed.append(replace(clips.items, batch_size=batch))
        else:
            images = reading.decoded(reading.table(paths))
            check_turned(images.paths, images.orientation.tolist(), "musubi-tuner", place, read.findings)
            beside = sizes_in_batch(keys, controls, model)
            items = partial(image_items, replace(keys, batch_size=batch), images.paths, beside)
            epoch = Epoch(placed, len(placed), items=items)
            placed.append(items(rule.place(images.sizes)))
        endings = images.captions if keys.caption_extension is None else (keys.caption_extension,)
        images = replace(images, repeats=images.repeats * keys.times, captions=endings)
        how = str(path), trainer, facts, focus_of(adapter, images.paths), adapter, epoch
        subjects.append(Subject(name, images, rule, batch, *how))
    return _checked(subjects, path, "images or clips", read.findings)


def from_job(path: Path, batch_size: int | None, reading: Reading) -> tuple[list[Subject], list[Finding]]:
    """The same of a job of ai-toolkit; its clips are left out, and one line says so."""
    job = read_job(path)
    trainer, adapter = Trainer(f"{job.arch} in ai-toolkit", {"ai-toolkit": job.step}), adapter_options(job)
    subjects, placed = [], {False: list[InBuckets](), True: list[InBuckets]()}
    for keys in job.datasets:
        files = files_of(keys, job.findings)
        paths = [path for path in files if not is_video(path)]
        if len(paths) < len(files):
            clips = counted(len(files) - len(paths), "clip")
            say(f"{keys.place}: {clips} left out; `kohya-bucket plan {argument(path)}` counts them", err=True)
        if not paths:
            continue
        images = reading.decoded(reading.table(paths))
        images = replace(
            images, repeats=images.repeats * max(keys.num_repeats, 1) * len(keys.flips), captions=(keys.caption_ext,),
            sizes=counted_sizes(keys, images.sizes, images.orientation, paths), upright=not keys.fast_image_size,
            orientation=images.orientation if keys.fast_image_size else np.ones_like(images.orientation),
        )  # fmt: skip
        rule, batch, mine = rule_of(keys, job.step), batch_size or keys.batch_size, placed[keys.is_reg]
        sides = (keys.resolution, keys.resolution)
        mine.append(PlacedDataset(images.paths, images.repeats, rule.place(images.sizes), batch, sides))
        name = f"{path.stem}, {keys.place}" if len(job.datasets) > 1 else path.stem
        options = adapter.unscheduled() if keys.is_reg else adapter
        how = str(path), trainer, None, None, options, Epoch(mine, len(mine) - 1)
        subjects.append(Subject(name, images, rule, batch, *how))
    return _checked(subjects, path, "images", job.findings)


def _checked(
    subjects: list[Subject], path: Path, what: str, findings: Iterable[Finding]
) -> tuple[list[Subject], list[Finding]]:
    serious = _serious(findings)
    if not subjects:
        raise ConfigError(f"{path}: no dataset with {what} in it: {'; '.join(one.text for one in serious[:3])}")
    return subjects, serious


def _serious(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity is not Severity.NOTE]
