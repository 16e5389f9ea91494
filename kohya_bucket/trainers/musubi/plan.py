"""What training with a config will be: its items placed and planned by the objects that train them, and what is wrong
with its files, for `kohya-bucket plan` and `doctor`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.clips import ClipPlacement
from kohya_bucket.buckets.focus import FocusCuts, focused
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.sizes import FloatArray, as_pair
from kohya_bucket.images.clips import ClipScan, read_clips
from kohya_bucket.images.parallel import Progress
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.file_findings import Section, ShowProgress, check_clips, check_turned, repaired
from kohya_bucket.trainers.door.findings import Finding, Findings, Severity
from kohya_bucket.trainers.door.options import AdapterOptions, required
from kohya_bucket.trainers.door.overview import Overview, PlannedDataset, add_overview, check_unmatched, place_datasets
from kohya_bucket.trainers.door.placed import InBuckets, PlacedItems, focus_of
from kohya_bucket.trainers.door.plan import DatasetPlan, Plan, entry_of_items, mode_text, times_text
from kohya_bucket.trainers.door.programs import Programs
from kohya_bucket.trainers.door.sizes import scan_sizes
from kohya_bucket.trainers.door.subject import Epoch, HeaderReader, Subject, some_subjects
from kohya_bucket.trainers.musubi.architectures import Family
from kohya_bucket.trainers.musubi.config import MusubiConfig, buckets_follow, frames_follow
from kohya_bucket.trainers.musubi.controls import Sizes, sizes_in_batch
from kohya_bucket.trainers.musubi.keys import CONTROL_IN_THE_MIDDLE, OWN_SIZES, ClipKeys, CommonKeys
from kohya_bucket.trainers.musubi.listing import list_items


@dataclass(frozen=True)
class DatasetOverview(PlannedDataset):
    """One dataset.

    Attributes:
        paths: [N] its images or clips.
        picture: [N] where each image goes, or the frames of each clip.
        left_out: (path, reason) of what is not trained.
        clips: what becomes of each clip; None for images.
        scan: what is known of each clip; None for images.
        focus: [N, 4] what each crop keeps, NaN where there is none; None where none is set.
        controls: the control images or clips that are read with each.
        number: which of the config's it is, from 1.
    """

    items: PlacedItems
    keys: CommonKeys
    paths: list[str]
    picture: Placement
    left_out: tuple[tuple[str, str], ...]
    clips: ClipPlacement | None = None
    scan: ClipScan | None = None
    focus: FloatArray | None = None
    controls: Sequence[Sequence[str]] = ()
    number: int = 0

    @property
    def focus_cuts(self) -> FocusCuts | None:
        """How many of the images' or clips' rectangles are cut; None where no focus is set."""
        return None if self.focus is None else FocusCuts.from_placement(self.picture, self.focus)

    def shown(self, model: Family, images: bool) -> DatasetPlan:
        """For a reader and for programs, with `images` also each image or clip."""
        keys, what = self.keys, self.keys.what
        width, height = keys.resolution
        rows = self._file_rows() if images else []
        entry: dict[str, Any] = {"kind": f"{what}s", "keys": asdict(keys)}
        entry |= entry_of_items(self.items, self.rows, len(self.paths), self.left_out)
        cuts = self.focus_cuts
        if cuts is not None:
            entry["focus"] = [cuts._asdict()]
        if self.clips is not None and self.scan is not None:
            entry |= {
                "frames": int(self.clips.frames.sum()),
                "frames_kept": int(self.clips.kept.sum()),
                "seconds": float(np.nansum(self.scan.seconds)),
                "seconds_lost": seconds_lost(self.scan, self.clips),
            }
        if images:
            entry["rows"] = rows
        mode = mode_text(*keys.mode(model))
        title = f"{what}s, {width}x{height}, {mode}, for {model.title}, batch size {keys.batch_size}"
        source = f"{keys.directory or keys.jsonl_file}: {counted(len(self.paths), what)}"
        above = [source + times_text([keys.num_repeats]), *self._clip_lines(entry)]
        return DatasetPlan(self.number, title, above, entry, [] if cuts is None else [str(cuts)], rows)

    def _clip_lines(self, entry: Mapping[str, Any]) -> list[str]:
        keys = self.keys
        if not isinstance(keys, ClipKeys) or self.clips is None:
            return []
        lengths = ", ".join(map(str, sorted(set(keys.target_frames))))
        lengths = "" if keys.frame_extraction == "full" else f" of {lengths}"
        source_fps = keys.source_fps
        rate = "" if source_fps is None else f", {source_fps:g} frames per second taken down to the model's rate"
        total, kept = entry["frames"], entry["frames_kept"]
        seconds = f" ({entry['seconds_lost']:,.1f} s)" if entry["seconds"] else ""
        return [
            f"frame_extraction {keys.frame_extraction}{lengths}{rate}",
            f"{counted(len(self.clips.spans), 'item')} with {kept:,} of {total:,} frames; "
            f"{total - kept:,} in none{seconds}",
        ]

    def _file_rows(self) -> list[Mapping[str, Any]]:
        """One for each clip or image that can be read: where it goes, and for a clip what is kept of it."""
        rows: list[Mapping[str, Any]] = []
        for i, path in enumerate(self.paths):
            bucket = self.picture.bucket_sizes[i].tolist()
            if not min(bucket):
                continue
            row: dict[str, Any] = {"path": path, "bucket": bucket, "crop_loss": float(self.picture.crop_loss[i])}
            if self.clips is not None and self.scan is not None:
                seconds, frames = float(self.scan.seconds[i]), int(self.clips.frames[i])
                kept = int(self.clips.kept[i])
                row |= {
                    "size": self.scan.sizes[i].tolist(),
                    "frames_in_file": int(self.scan.frames[i]),
                    "counted": bool(self.scan.counted[i]),
                    "fps": float(self.scan.fps[i]) or None,
                    "frames": frames,
                    "kept": kept,
                    "dropped": frames - kept,
                    "seconds_lost": None if np.isnan(seconds) else seconds * (1 - kept / max(frames, 1)),
                    "items": self.clips.spans.length[self.clips.spans.clip == i].tolist(),
                }
            rows.append(row)
        return rows


def plan_of(
    read: MusubiConfig, gpus: Sequence[int], accumulate: int, images: bool, progress: Progress | None = None
) -> Plan:
    """The plan of a config, with `images` also of each image or clip; what is not trained is among the findings."""
    if not read.model.name:
        message = "no model is named, and what is shown holds for every one but HiDream-O1 and MiniMax-H3"
        read.findings.note("no-architecture", "", message, "name it, e.g. --arch wan")
    seen = overview(read, read.options, gpus, accumulate, progress)
    datasets = [data.shown(read.model, images) for data in seen.datasets]
    unplanned = sorted({*range(1, len(read.places) + 1)} - {data.number for data in datasets})
    head = {"config": str(read.path), "architecture": read.model.name or None}
    return Plan("musubi-tuner", read.findings, head, datasets, seen.gpus, seen.options, accumulate, unplanned)


def _place(
    config: MusubiConfig, i: int, options: AdapterOptions, decode: bool, progress: Progress | None
) -> DatasetOverview:
    """Raises `BucketSettingsError` for keys from which no buckets follow."""
    keys, place, model, findings = config.datasets[i], config.places[i], config.model, config.findings
    paths, controls = list_items(keys, place, findings, model, config.folders)
    focus = focus_of(options, paths)
    if focus is not None and any(getattr(keys, name, None) for name in OWN_SIZES):
        findings.note("focus-control", place, CONTROL_IN_THE_MIDDLE)
    if isinstance(keys, ClipKeys):
        scan = read_clips(paths, decode=decode, first=True, progress=progress)
        check_clips(scan, "musubi-tuner", place, findings)
        return replace(place_clips(keys, place, paths, scan, model, findings, focus), controls=controls)
    sizes = scan_sizes(paths, progress=progress)
    check_turned(paths, sizes.orientation.tolist(), "musubi-tuner", place, findings)
    placement = focused(keys.picture_rule(model).place(sizes.sizes), focus)
    left_out = _left_out(paths, placement.reasons, sizes.failures, keys.what, place, findings)
    items = image_items(keys, paths, sizes_in_batch(keys, controls, model), placement)
    return DatasetOverview(items, keys, paths, placement, left_out, focus=focus, controls=controls, place=place)


def image_items(keys: CommonKeys, paths: Sequence[str], controls: Sequence[Sizes], placement: Placement) -> PlacedItems:
    """What is trained of N images in a placement; `controls` are those of `sizes_in_batch`."""
    kept = np.flatnonzero(placement.placed)
    buckets = []
    for i in kept.tolist():
        bucket = as_pair(placement.bucket_sizes[i])
        beside = [bucket if size is None else size for size in controls[i]]
        buckets.append((*bucket, 1, *beside) if beside else bucket)
    names = [os.path.basename(paths[i]) for i in kept.tolist()]
    return PlacedItems.from_buckets(
        names, buckets, keys.times, keys.batch_size, keys.resolution, placement.crop_loss[kept]
    )


def place_clips(
    keys: ClipKeys, place: str, paths: list[str], scan: ClipScan, model: Family, findings: Findings,
    focus: FloatArray | None = None,
) -> DatasetOverview:  # fmt: skip
    """The items of a dataset of clips, and where each goes."""
    placed = keys.clip_rule(model).place(scan.sizes, scan.frames, keys.rates(model, scan.fps))
    spans = placed.spans
    sections = np.ones(len(spans), dtype=np.int64)
    if model.in_sections:
        sections = (model.grid.latent_frames(spans.length) - 1) // max(keys.fp_latent_window_size, 1)
        if short := sorted({paths[i] for i in spans.clip[sections < 1].tolist()}):
            need = keys.fp_latent_window_size * model.grid.stride + model.grid.base
            message = f"{counted(len(short), 'clip')} with fewer than {need} frames in an item, at which "
            message += f"{model.title} stops: {some(short)}"
            findings.error("short-sections", place, message, f"list target_frames of {need} or more", short)
    left_out = _left_out(paths, placed.reasons, scan.failures, keys.what, place, findings)
    names = []  # as their caches are called, except for the size: first frame, frames, and the section if there are
    runs = (column.tolist() for column in (spans.clip, spans.start, spans.length, sections))
    for clip, start, length, count in zip(*runs, strict=True):
        name = f"{os.path.splitext(os.path.basename(paths[clip]))[0]}_{start:05d}-{length:03d}"
        names += [f"{name}-{section:04d}" for section in range(count)] if model.in_sections else [name]
    of_item = np.repeat(np.arange(len(sections)), sections)
    buckets = [tuple(bucket) for bucket in placed.buckets[placed.bucket_index[of_item]].tolist()]
    losses = placed.picture.crop_loss[spans.clip[of_item]]
    items = PlacedItems.from_buckets(names, buckets, keys.times, keys.batch_size, keys.resolution, losses)
    remark, picture = f", {seconds_lost(scan, placed):,.1f} s in no item", focused(placed.picture, focus)
    return DatasetOverview(
        items, keys, paths, picture, left_out, placed, scan, focus, remark=remark, place=place
    )  # fmt: skip


def _left_out(
    paths: list[str], reasons: npt.NDArray[np.uint8], failures: Sequence[tuple[int, str, str]], what: str, place: str,
    findings: Findings,
) -> tuple[tuple[str, str], ...]:  # fmt: skip
    """(path, reason) of what is not trained, as findings too: short clips are one thing, and broken files another."""
    unreadable = {i: why for i, _, why in failures}
    without = np.flatnonzero(reasons != Reason.PLACED).tolist()
    left_out = tuple((paths[i], unreadable.get(i) or Reason(int(reasons[i])).text) for i in without)
    if short := [path for path, why in left_out if why == Reason.TOO_SHORT.text]:
        message = f"{counted(len(short), what)} with fewer frames than the shortest of target_frames: {some(short)}"
        findings.warning("too-short", place, message, "list a shorter length, or leave them out", short)
    if rest := [one for one in left_out if one[1] != Reason.TOO_SHORT.text]:
        names = [f"{path}: {why}" for path, why in rest]
        message = f"{counted(len(rest), what)} cannot be trained ({some(names, 1)})"
        findings.warning("not-trained", place, message, repaired(dict(rest)), names)
    return left_out


_SAME_RATE = 0.01
_MUCH = 0.5


def seconds_lost(scan: ClipScan, clips: ClipPlacement) -> float:
    """Seconds of readable clips that no item has; frames that are dropped to change the rate are not lost."""
    seconds = np.nan_to_num(scan.seconds) * (1 - clips.kept / np.maximum(clips.frames, 1))
    return float(seconds[clips.frames > 0].sum())


def _check_clips(data: DatasetOverview, model: Family, findings: Findings) -> None:
    keys, scan = data.keys, data.scan
    if not isinstance(keys, ClipKeys) or scan is None or data.clips is None:
        return
    _check_rates(keys, scan, data.place, model, findings)
    if turned := [scan.paths[i] for i in np.flatnonzero(scan.rotation).tolist()]:
        message = f"{counted(len(turned), 'clip')} that players turn, and musubi-tuner does not: {some(turned)}"
        findings.warning("rotated", data.place, message, "encode them again, or train them lying on their side", turned)
    if decoded := [scan.paths[i] for i in np.flatnonzero(scan.counted).tolist()]:
        message = f"the frames of {counted(len(decoded), 'clip')} were counted by decoding: {some(decoded)}"
        findings.note("counted", data.place, message, "their containers do not say how many there are", decoded)
    total, lost = float(np.nansum(scan.seconds)), seconds_lost(scan, data.clips)
    if lost > _MUCH * total > 0:
        message = f"{lost:,.1f} of {total:,.1f} seconds are in no item"
        remedy = "list more target_frames, or use frame_extraction = 'chunk' or 'slide'"
        findings.warning("seconds-lost", data.place, message, remedy)


def _check_rates(keys: ClipKeys, scan: ClipScan, place: str, model: Family, findings: Findings) -> None:
    expected = keys.source_fps or model.target_fps
    if expected is None or model.by_time:
        return
    other = np.flatnonzero((scan.fps > 0) & (np.abs(scan.fps - expected) > _SAME_RATE * expected)).tolist()
    names = [scan.paths[i] for i in other]
    _check_source_fps(keys, place, model, findings)
    if not names:
        return
    rates = sorted({f"{scan.fps[i]:.5g}" for i in other}, key=float)
    have = f"{counted(len(names), 'clip')} {'has' if len(names) == 1 else 'have'} {some(rates)} frames per second"
    if keys.source_fps is not None:
        message = f"source_fps is {keys.source_fps}, but {have}, and will move too fast or too slow: {some(names)}"
        findings.warning("source-fps", place, message, "a dataset for each rate, with its source_fps", names)
        return
    message = f"{model.title} trains {expected:g} frames per second; {have}, and every frame is taken"
    fast = [rate for rate in rates if float(rate) > expected]
    alone = len(fast) == len(rates) == 1 and len(names) == np.count_nonzero(scan.fps > 0)
    remedies = [_ANEW.format(expected)] if len(fast) < len(rates) else []
    if fast:
        way = f"set source_fps = {float(fast[0])}" if alone else "make a dataset for each rate, with its source_fps"
        remedies.insert(0, f"to drop frames of the faster ones, {way}" if len(remedies) else f"to drop frames, {way}")
    findings.note("source-fps", place, message, "; ".join(remedies), names)


_ANEW = "re-encode slower ones at {:g} frames per second: a source_fps below that only leaves out items"


def _check_source_fps(keys: ClipKeys, place: str, model: Family, findings: Findings) -> None:
    if keys.source_fps is not None and model.target_fps and keys.source_fps < (1 - _SAME_RATE) * model.target_fps:
        message = f"source_fps is {keys.source_fps:g}, below the {model.target_fps:g} of {model.title}: it can drop "
        message += "frames and add none, so clips still move too fast, and frame_extraction 'head' ends early"
        findings.warning("source-fps", place, message, f"leave it out, or {_ANEW.format(model.target_fps)}")


def overview(
    config: MusubiConfig, options: AdapterOptions | None, gpus: Sequence[int] = (1,), accumulate: int = 1,
    progress: Progress | None = None, *, decode: bool = False,
) -> Overview[DatasetOverview]:  # fmt: skip
    """Place and plan what `config` trains, or would train without the mistakes that stop it.

    What its files show to be wrong is added to its findings. Nothing is planned without options. With `decode`, every
    clip is decoded to its end.

    Raises:
        KohyaBucketError: keys or options from which no buckets follow, with the dataset's place in the config.
    """
    if options is None:
        return Overview(AdapterOptions())
    model, stopped = config.model, bool(config.findings.of(Severity.ERROR))

    def place(i: int) -> DatasetOverview | None:
        if not frames_follow(config.datasets[i], model):
            return None
        if stopped and not (config.readable[i] and buckets_follow(config.datasets[i], config.places[i], model)):
            return None
        data = _place(config, i, options, decode, progress)
        _check_clips(data, model, config.findings)
        files = f"{counted(len(data.paths), data.keys.what)}, {counted(len(data.items.keys), 'item')}"
        return replace(data, number=i + 1, name=f"dataset {i + 1}", files=files)

    nothing = "no-items", "nothing can be trained, each for its own reason", "see what is listed"
    placed = place_datasets(config.places, place, config.findings, nothing)
    check_unmatched(options, [data.focus for data in placed], config.findings)
    return Overview.planned(placed, options, gpus, accumulate, config.findings, moves=False)


def config_section(read: MusubiConfig, show: ShowProgress, *, decode: bool) -> Section:
    """What `kohya-bucket doctor` says of a config: its mistakes, and the images and clips that will fail.

    With `decode`, all images are decoded, and all clips to the end; else their headers and containers are read only.
    """
    checked_for = read.model.title + ("" if read.model.name else "; name it for advice that fits: --arch wan")
    section = Section(f"config {read.path}, of musubi-tuner", [("checked for", checked_for)], read.findings)
    look = partial(overview, read, read.options, (1,), 1, decode=decode)
    seen = add_overview(section, show, "reading images and clips", look)
    if decode and seen is not None:
        left_out = {path for data in seen.datasets for path, _ in data.left_out}
        of_images = [data for data in seen.datasets if data.clips is None]
        images = (path for data in of_images for path in (*data.paths, *itertools.chain(*data.controls)))
        section.decode((p for p in images if p not in left_out), show, ", at which musubi-tuner stops", stops=True)
        if clips := sum(len(data.paths) for data in seen.datasets if data.clips is not None):
            section.facts.append(("decoded clips", f"{clips:,}"))
    return section


def subjects_of(
    read: MusubiConfig, programs: Programs, batch_size: int | None, reader: HeaderReader
) -> tuple[list[Subject], list[Finding]]:
    """Every dataset of a config that has images or clips, and what is wrong with the config."""
    model, options = read.model, required(read.options, read.findings, read.path)
    subjects, placed = [], list[InBuckets]()
    for number, (keys, place) in enumerate(zip(read.datasets, read.places, strict=True), 1):
        paths, controls = list_items(keys, place, read.findings, model, read.folders)
        if not paths:
            continue
        name = f"{read.path.stem}, dataset {number}" if len(read.datasets) > 1 else read.path.stem
        batch = batch_size or keys.batch_size
        rule, facts, epoch = keys.picture_rule(model), None, None
        if isinstance(keys, ClipKeys):
            facts, images = reader.clips(paths)
            clips = place_clips(keys, place, paths, facts.scan, model, Findings())
            facts = replace(facts, placement=clips.clips)
            placed.append(replace(clips.items, batch_size=batch))
        else:
            images = reader.decoded(reader.table(paths))
            check_turned(images.paths, images.orientation.tolist(), "musubi-tuner", place, read.findings)
            beside = sizes_in_batch(keys, controls, model)
            items = partial(image_items, replace(keys, batch_size=batch), images.paths, beside)
            epoch = Epoch(placed, len(placed), items=items)
            placed.append(items(rule.place(images.sizes)))
        endings = images.captions if keys.caption_extension is None else (keys.caption_extension,)
        images = replace(images, repeats=images.repeats * keys.times, captions=endings)
        how = str(read.path), programs, facts, focus_of(options, images.paths), options, epoch
        subjects.append(Subject(name, images, rule, batch, *how))
    return some_subjects(subjects, read.path, "images or clips", read.findings)
