"""What training a job will be: its images placed and planned by the objects that train them."""

from __future__ import annotations

import codecs
import locale
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import BucketRule, Placement
from kohya_bucket.buckets.rules.fixed import OneBucket
from kohya_bucket.buckets.sizes import IntArray, as_pair
from kohya_bucket.buckets.trainers import AIToolkitBuckets
from kohya_bucket.checks import path_meant
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import argument
from kohya_bucket.images.clips import read_clips
from kohya_bucket.images.formats import IMAGE_EXTENSIONS, is_video
from kohya_bucket.images.parallel import Progress
from kohya_bucket.texts import counted, parse_json, read_text, some
from kohya_bucket.trainers.ai_toolkit.companions import IMAGES, check_companions
from kohya_bucket.trainers.ai_toolkit.config import CLIPS, JobConfig, JobKeys, files_below, listed
from kohya_bucket.trainers.ai_toolkit.controls import Layout, control_layouts, controls_beside
from kohya_bucket.trainers.ai_toolkit.objects import CACHED
from kohya_bucket.trainers.door.captions import check_blank, check_broken, check_marks, check_missing, read_captions
from kohya_bucket.trainers.door.face import OneItem, Way
from kohya_bucket.trainers.door.file_findings import Section, ShowProgress, check_clips, check_ignored, repaired
from kohya_bucket.trainers.door.file_names import check_names
from kohya_bucket.trainers.door.findings import Finding, Findings, Severity
from kohya_bucket.trainers.door.options import AdapterOptions, placed_by_trainer, required
from kohya_bucket.trainers.door.overview import Overview, PlannedDataset, add_overview
from kohya_bucket.trainers.door.placed import InBuckets, PlacedItems
from kohya_bucket.trainers.door.plan import DatasetPlan, Plan, entry_of_items, times_text
from kohya_bucket.trainers.door.programs import Programs
from kohya_bucket.trainers.door.sizes import scan_sizes
from kohya_bucket.trainers.door.subject import Epoch, HeaderReader, Subject, some_subjects


@dataclass(frozen=True)
class DatasetOverview(PlannedDataset):
    """One dataset at one resolution; each turn of one of its files is an item.

    Attributes:
        paths: [N] its images and clips.
        sizes: [N, 2] as ai-toolkit counts them, see `counted_sizes`.
        placement: [N] where each goes.
        left_out: (path, reason) of what is not trained.
    """

    items: PlacedItems
    keys: JobKeys
    paths: list[str]
    sizes: IntArray
    placement: Placement
    left_out: tuple[tuple[str, str], ...]

    def shown(self, arch: str, images: bool) -> DatasetPlan:
        """For a reader and for programs, with `images` also each image or clip."""
        keys, placement = self.keys, self.placement
        columns = zip(
            self.paths, self.sizes.tolist(), placement.bucket_sizes.tolist(), placement.crop_loss, strict=True
        )
        rows = [
            {"path": path, "bucket": bucket, "crop_loss": float(loss), "size": size}
            for path, size, bucket, loss in columns
            if images and min(bucket)
        ]
        entry: dict[str, Any] = {"kind": "regularization" if keys.is_reg else "images", "keys": asdict(keys)}
        entry |= entry_of_items(self.items, self.rows, len(self.paths), self.left_out)
        if images:
            entry["rows"] = rows
        turns = f", each in {len(keys.flips)} turns" if len(keys.flips) > 1 else ""
        times = times_text([max(keys.num_repeats, 1)])
        source = f"{keys.source}: {self.files}{times}{turns}"
        kind = "square crops" if keys.square_crop else "buckets"
        title = f"{keys.resolution}x{keys.resolution}, {kind}, for {arch}, "
        title += f"batch size {keys.batch_size}{', regularization' * keys.is_reg}"
        return DatasetPlan(keys.number, title, [source], entry, (), rows)


def plan_of(
    job: JobConfig, gpus: Sequence[int], accumulate: int | None, images: bool, progress: Progress | None = None
) -> Plan:
    """The plan of a job, with `images` also of each image; `accumulate` is, where not given, what the job says."""
    accumulate = accumulate or job.accumulate
    seen = overview(job, gpus, accumulate, progress)
    datasets = [data.shown(job.arch, images) for data in seen.datasets]
    head = {"config": str(job.path), "architecture": job.arch}
    return Plan("ai-toolkit", job.findings, head, datasets, seen.gpus, seen.options, accumulate, (), job.length)


def rule_of(keys: JobKeys, step: int) -> BucketRule:
    """What gives an image of a dataset its bucket."""
    return OneBucket((keys.resolution,) * 2) if keys.square_crop else AIToolkitBuckets(keys.resolution, step)


_SIZES = ".aitk_size.json"
_KEPT_BY = "0.1.2"  # ai-toolkit drops the file of any other version, and makes it anew


def counted_sizes(
    keys: JobKeys, sizes: IntArray, orientation: npt.NDArray[np.uint8], paths: Sequence[str] = ()
) -> IntArray:
    """[N, 2] sizes by which images get their buckets: turned as EXIF asks, unless `fast_image_size`; times `scale`.

    Of images of a dataset, named by `paths`, those that ai-toolkit has kept count, see `_kept_sizes`.
    """
    turned = (orientation > 4) & (not keys.fast_image_size)
    counted = np.where(turned[:, None], sizes[:, ::-1], sizes)
    for i, size in _kept_sizes(keys, paths).items():
        counted[i] = size if counted[i].min() else 0
    return np.asarray(counted * keys.scale).astype(np.int32)


def _kept_sizes(keys: JobKeys, paths: Sequence[str]) -> dict[int, tuple[int, int]]:
    """By position, sizes in the file that ai-toolkit writes beside images: it takes them as long as an image has the
    length and the second of change that it had, whatever `fast_image_size` says now.
    """
    folder = keys.source if os.path.isdir(keys.source) else os.path.dirname(keys.source)
    try:
        kept = parse_json(read_text(Path(folder, _SIZES))) if paths else {}
    except (OSError, ValueError):
        return {}
    kept_sizes: dict[int, tuple[int, int]] = {}
    is_taken = isinstance(kept, dict) and kept.get("__version__") == _KEPT_BY
    for i, path in enumerate(paths if is_taken else ()):
        entry: Any = kept.get(path.replace(folder, ""))
        if not isinstance(entry, list) or len(entry) != 3:  # of clips there are more
            continue
        with suppress(OSError):
            now = os.stat(path)
            sound = all(type(side) is int and 0 < side < 1 << 31 for side in entry[:2])
            if sound and entry[2] == f"{now.st_size}:{int(now.st_mtime)}":
                kept_sizes[i] = entry[0], entry[1]
    return kept_sizes


def files_of(keys: JobKeys, findings: Findings) -> list[str]:
    """The images, and where clips are trained the clips, of a dataset, in an order that no file system decides."""
    try:
        files, beside, stated = listed(keys)
    except (OSError, ValueError, TypeError) as error:
        message = f"{keys.source} is neither a folder nor a JSON file whose keys are paths ({error})"
        findings.error("missing-folder", keys.place, message, path_meant(keys.source))
        return []
    if os.path.isdir(keys.source):
        others = tuple(ending for ending in IMAGE_EXTENSIONS if ending not in IMAGES)
        every = sorted(files_below(keys.source, ("",)))
        ignored = [path for path in every if path.lower().endswith(others)]
        check_ignored(ignored, "ai-toolkit", keys.place, findings)
        check_names(every, "ai-toolkit", keys.place, findings)
    else:
        _check_code_page(keys, findings)
    _check_captions(beside, stated, keys, findings)
    if not files:
        kinds = "images or clips" if keys.of_clips else "images"
        message = f"{keys.source} holds no {kinds} that ai-toolkit reads ({', '.join(IMAGES)})"
        findings.error("no-images", keys.place, message, "correct folder_path, or convert them")
    return files


def _check_code_page(keys: JobKeys, findings: Findings) -> None:
    used = locale.getpreferredencoding(False)
    if codecs.lookup(used).name not in ("utf-8", "ascii") and not read_text(Path(keys.source)).isascii():
        message = f"ai-toolkit reads {keys.source} as {used}, the system's own encoding, and trains other letters"
        remedy = "set PYTHONUTF8=1 before it is started, or write them as \\u00e9"
        findings.warning("code-page", f"dataset {keys.number}", message, remedy, (keys.source,))


def _check_captions(beside: Mapping[str, str], stated: Mapping[str, Any], keys: JobKeys, findings: Findings) -> None:
    """Name images without a caption, caption files at which ai-toolkit stops, and marks that it trains."""
    place, files, total = f"dataset {keys.number}", list(beside.values()), len(beside) + len(stated)
    texts, broken = read_captions(files)
    check_broken(broken, "ai-toolkit", place, findings)
    check_marks(zip(files, texts, strict=True), place, findings)
    found = list(zip(beside.items(), texts, strict=True))
    then, severity, what = "an empty caption is trained", None, "file" if keys.of_clips else "image"
    if keys.is_reg or keys.default_caption or keys.trigger_word:
        severity = Severity.NOTE
        then = f"the default_caption {keys.default_caption!r} is trained" if keys.default_caption else then
        if keys.trigger_word and not (keys.is_reg or keys.default_caption):
            then = f"the trigger word {keys.trigger_word!r} alone is trained"
    else:
        said = {path: text or "" for path, text in stated.items() if text is None or isinstance(text, str)}
        check_blank([*said.items(), *((image, text) for (image, _), text in found)], total, place, findings)
    bare = [image for (image, file), text in found if text is None and file not in broken]
    ending, key = keys.caption_ext, "caption_ext"
    check_missing(
        bare, total, ending, then, place, findings, key=key, default=".txt", severity=severity, what=what
    )  # fmt: skip


def listed_as(keys: JobKeys, image: Path) -> list[str]:
    """An image as `files_of` lists it, where it lies in the dataset's folder."""
    with suppress(ValueError):
        return [os.path.join(keys.source, image.resolve().relative_to(Path(keys.source).resolve()))]
    return []


def _place(keys: JobKeys, job: JobConfig, progress: Progress | None) -> DatasetOverview:
    findings = job.findings
    paths = files_of(keys, findings)
    check_companions(keys.companions, paths, f"dataset {keys.number}", findings)
    is_clip = np.array([keys.of_clips and path.lower().endswith(CLIPS) for path in paths], dtype=np.bool_)
    sizes, orientation = np.zeros((len(paths), 2), dtype=np.int32), np.ones(len(paths), dtype=np.uint8)
    reasons: dict[int, str] = {}
    for clips in (False, True):
        rows = np.flatnonzero(is_clip == clips)
        if not len(rows):
            continue
        of_kind = [paths[i] for i in rows.tolist()]
        if clips:
            scan = read_clips(of_kind, first=True, progress=progress)
            check_clips(scan, "ai-toolkit", keys.place, findings)
            sizes[rows], failures = scan.sizes, scan.failures
        else:
            images = scan_sizes(of_kind, progress=progress)
            sizes[rows], orientation[rows], failures = images.sizes, images.orientation, images.failures
        reasons |= {int(rows[i]): why for i, _, why in failures}
    # The sizes that decide: ai-toolkit's own file of them goes before what the images are.
    by_setting, sizes = counted_sizes(keys, sizes, orientation), counted_sizes(keys, sizes, orientation, paths)
    if others := [paths[i] for i in np.flatnonzero((by_setting != sizes).any(axis=1)).tolist()]:
        message = f"{counted(len(others), 'image')} of another size in {_SIZES} than fast_image_size gives, and "
        message += f"ai-toolkit takes that ({some(others, 2)})"
        findings.warning("kept-sizes", keys.place, message, f"delete {_SIZES}: it is made again", others)
    placement = rule_of(keys, job.step).place(sizes)
    left_out = tuple((paths[i], reasons.get(i, "it is too small for any bucket"))
                     for i in np.flatnonzero(~placement.placed).tolist())  # fmt: skip
    if left_out:
        first = some([f"{path}: {why}" for path, why in left_out], 1)
        message = f"{counted(len(left_out), 'file')} that ai-toolkit leaves out ({first})"
        findings.warning("not-trained", keys.place, message, repaired(dict(left_out)), [path for path, _ in left_out])
    frames = np.where(is_clip, keys.num_frames, 1).tolist()
    items = _items(keys, paths, _layouts_beside(keys, job, paths), placement, frames)
    files = counted(len(paths), "file")
    return DatasetOverview(
        items, keys, paths, sizes, placement, left_out, name=keys.place, place=keys.place, files=files
    )


def _layouts_beside(keys: JobKeys, job: JobConfig, paths: Sequence[str]) -> list[Layout]:
    beside = controls_beside(paths, keys.companions)
    return control_layouts(beside, job.arch, raw=job.raw_controls, full_size=keys.full_size_control_images)


def _items(
    keys: JobKeys, paths: Sequence[str], layouts: Sequence[Layout], placement: Placement, frames: Sequence[int] = ()
) -> PlacedItems:
    """What is trained of N files in a placement; `layouts` are those of their control images, `frames` of clips."""
    kept, turns = np.flatnonzero(placement.placed).tolist(), len(keys.flips)
    buckets: list[tuple[Any, ...]] = []
    for i in kept:
        more = (frames[i] if frames else 1, *layouts[i]) if layouts[i] or keys.of_clips else ()
        buckets.append((*as_pair(placement.bucket_sizes[i]), *more))
    return PlacedItems.from_buckets(
        [paths[i] for i in kept] * turns, buckets * turns, max(keys.num_repeats, 1), keys.batch_size,
        (keys.resolution,) * 2, np.tile(placement.crop_loss[kept], turns),
    )  # fmt: skip


def overview(
    job: JobConfig, gpus: Sequence[int] = (1,), accumulate: int = 1, progress: Progress | None = None
) -> Overview[DatasetOverview]:
    """Place and plan what a job trains; the epoch on GPUs is that of its images without regularization.

    What its files show to be wrong is added to its findings.

    Raises:
        KohyaBucketError: options from which no plan follows.
    """
    options = job.options
    if options is None:
        return Overview(AdapterOptions())
    cached = any(keys.cache_latents or keys.cache_latents_to_disk for keys in job.datasets)
    for conflict in placed_by_trainer(options, "ai-toolkit", CACHED if cached else ""):
        raise ConfigError(f"{job.path}: {conflict}")
    placed = [_place(keys, job, progress) for keys in job.datasets]
    placed = [data for data in placed if len(data.items.keys)]
    trained, regularizing = (
        Overview.planned(
            [data for data in placed if data.keys.is_reg == is_reg],
            of_these,
            gpus,
            accumulate,
            job.findings,
            moves=not cached,
        )
        for is_reg, of_these in ((False, options), (True, options.unscheduled()))
    )
    return Overview(options, trained.datasets + regularizing.datasets, trained.gpus or regularizing.gpus)


def job_section(job: JobConfig, show: ShowProgress, *, decode: bool) -> Section:
    """What `kohya-bucket doctor` says of a job: its mistakes, and the files that will fail."""
    section = Section(
        f"job {job.path}, of ai-toolkit", [("model", f"{job.arch}, in steps of {job.step}")], job.findings
    )
    seen = add_overview(section, show, "reading images", partial(overview, job, (1,), 1))
    if decode and seen is not None:
        left_out = {path for data in seen.datasets for path, _ in data.left_out}
        files = (path for data in seen.datasets for path in data.paths if path.lower().endswith(IMAGES))
        then = ", for which ai-toolkit trains another one, drawn at random"
        section.decode((path for path in files if path not in left_out), show, then, stops=False)
    return section


def subjects_of(job: JobConfig, batch_size: int | None, reader: HeaderReader) -> tuple[list[Subject], list[Finding]]:
    """Every dataset of a job that has images, and what is wrong with the job; a line says how many clips it has."""
    path, options = job.path, required(job.options, job.findings, job.path)
    programs = Programs(f"{job.arch} in ai-toolkit", {"ai-toolkit": job.step})
    # Regularization images have epochs of their own.
    subjects, placed = [], {False: list[InBuckets](), True: list[InBuckets]()}
    for keys in job.datasets:
        files = files_of(keys, job.findings)
        paths = [file for file in files if not is_video(file)]
        if len(paths) < len(files):
            clips = counted(len(files) - len(paths), "clip")
            reader.say(f"{keys.place}: {clips} left out; `kohya-bucket plan {argument(path)}` counts them")
        if not paths:
            continue
        images = reader.decoded(reader.table(paths))
        images = replace(
            images, repeats=images.repeats * max(keys.num_repeats, 1) * len(keys.flips), captions=(keys.caption_ext,),
            sizes=counted_sizes(keys, images.sizes, images.orientation, paths), upright=not keys.fast_image_size,
            orientation=images.orientation if keys.fast_image_size else np.ones_like(images.orientation),
        )  # fmt: skip
        rule, batch, together = rule_of(keys, job.step), batch_size or keys.batch_size, placed[keys.is_reg]
        own = replace(keys, batch_size=batch)
        items = partial(_items, own, images.paths, _layouts_beside(keys, job, images.paths))
        together.append(items(rule.place(images.sizes)))
        name = f"{path.stem}, {keys.place}" if len(job.datasets) > 1 else path.stem
        of_epoch = options.unscheduled() if keys.is_reg else options
        how = str(path), programs, None, None, of_epoch, Epoch(together, len(together) - 1, items=items)
        subjects.append(Subject(name, images, rule, batch, *how))
    return some_subjects(subjects, path, "images", job.findings)


def ways_of(job: JobConfig, item: OneItem) -> list[Way]:
    """How each dataset of a job trains an image; `ConfigError` where none of it is left."""
    sizes, turns = np.array([item.size], dtype=np.int32), np.array([item.orientation], dtype=np.uint8)
    ways = []
    for keys in job.datasets:
        listed = listed_as(keys, item.file) if item.file else ()
        size = as_pair(counted_sizes(keys, sizes, turns, listed)[0])
        if min(size) < 1:
            stored = "{}x{}".format(*item.size)
            raise ConfigError(f"{job.path}: {keys.place}: scale = {keys.scale} leaves no pixel of {stored}")
        ways.append(Way(f"{keys.place} (for {job.arch})", rule_of(keys, job.step), size))
    return ways
