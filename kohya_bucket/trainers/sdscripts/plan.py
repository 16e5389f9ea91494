"""What training with a config will be: its datasets placed and planned by the objects that the adapter trains with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.focus import FocusCuts
from kohya_bucket.buckets.misfits import BARELY, enlargement, limit_cost, narrowest_usual
from kohya_bucket.buckets.rules.registry import named_rule
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.sizes import SizeScan
from kohya_bucket.planning import RESOLUTION_MODES
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, adjust_to_steps, at_resolutions, rule_for
from kohya_bucket.trainers.door.file_findings import check_turned, repaired
from kohya_bucket.trainers.door.findings import Findings, Severity
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.overview import Overview, PlannedDataset, check_unmatched, place_datasets
from kohya_bucket.trainers.door.placed import PlacedDataset, by_bucket
from kohya_bucket.trainers.door.placing import place_all
from kohya_bucket.trainers.door.plan import DatasetPlan, Plan, mode_text, times_text
from kohya_bucket.trainers.door.programs import Programs
from kohya_bucket.trainers.door.sizes import scan_sizes
from kohya_bucket.trainers.sdscripts.config import Config, ReadDataset
from kohya_bucket.trainers.sdscripts.config.check import buckets_follow
from kohya_bucket.trainers.sdscripts.config.model import refuse_lost_focus
from kohya_bucket.trainers.sdscripts.config.run_file import RunLength
from kohya_bucket.trainers.sdscripts.wording import rule_text


@dataclass(frozen=True)
class DatasetOverview(PlannedDataset):
    """One dataset.

    Attributes:
        items: the images that are trained, in their buckets.
        read: what the config says of it.
        sizes: [N, 2] their sizes.
        left_out: (key, reason) of the images that are not trained.
        mends: for each of them keys of the config, with values with which it is trained; see `mends_of`.
    """

    items: PlacedDataset
    read: ReadDataset
    sizes: IntArray
    left_out: tuple[tuple[str, str], ...]
    mends: tuple[dict[str, Any], ...] = ()

    @property
    def focus_cuts(self) -> list[FocusCuts]:
        """What the crops of each resolution cut off the images' focus; none where no focus is set."""
        focus = self.items.focus
        if focus is None:
            return []
        return [FocusCuts.from_placement(placement, focus) for placement in self.items.placements]

    def enlarged_per_bucket(self) -> list[tuple[int, float]]:
        """How many images of each bucket in use are scaled up, and how many times at most (of images that shrink, below
        1), in the order of `rows`.
        """
        image, bucket = self.items.pairs
        scales = np.stack([enlargement(self.sizes, placement) for placement in self.items.placements])
        factor = scales[self.items.resolution_of_bucket[bucket], image]
        parts = by_bucket(factor, bucket, len(self.items.buckets))
        return [(int((part > BARELY).sum()), float(part.max(initial=0.0))) for part in parts]

    def image_rows(self) -> list[dict[str, Any]]:
        """One row per image that is trained, with several resolutions one for each that it is trained at.

        Sizes are in pixels; `cut` are pixels of the resized image: left, top, right, bottom.
        """
        rows = []
        for at in self.items.placements:
            columns = {
                "key": self.items.keys,
                "size": self.sizes.tolist(),
                "bucket": at.bucket_sizes.tolist(),
                "resized": at.resized_sizes.tolist(),
                "cut": at.cuts.tolist(),
                "crop_loss": at.crop_loss.tolist(),
                "repeats": self.items.repeats.tolist(),
            }
            for placed, *values in zip(at.placed.tolist(), *columns.values(), strict=True):
                if placed:
                    rows.append(dict(zip(columns, values, strict=True)))
        return rows

    def shown(self, options: AdapterOptions, images: bool) -> DatasetPlan:
        """For a reader and for programs, with `images` also each image."""
        config, placed = self.read.config, self.items
        width, height = config.resolution or (0, 0)
        kind = config.kind.name.lower()
        resolution = f"{width}x{height}" if options.resolutions is None else _resolutions(options)
        rule = rule_text(placed, options, enable_bucket=config.enable_bucket)
        held_back = 0 if self.read.validation is None else len(self.read.validation)
        below = [] if self.read.validation is None else [f"held back for validation: {held_back:,}"]
        at = [f"{w}x{h}, " for w, h in options.resolutions or ()] or [""]
        below += [f"{where}{cuts}" for where, cuts in zip(at, self.focus_cuts, strict=False)]
        rows = self.image_rows() if images else []
        entry = {
            "kind": kind,
            "resolution": config.resolution,
            "batch_size": config.batch_size,
            "enable_bucket": config.enable_bucket,
            "bucket_no_upscale": config.bucket_no_upscale,
            "images": len(placed.keys),
            "samples": sum(row.samples for row in self.rows),
            "batches": sum(row.batches for row in self.rows),
            "validation_images": held_back,
            "focus": [cuts._asdict() for cuts in self.focus_cuts],
            "buckets": [
                {**asdict(row), "bucket": row.bucket.as_tuple(), "aspect": row.bucket.aspect_ratio}
                | {"enlarged": enlarged, "largest_enlargement": most}
                for row, (enlarged, most) in zip(self.rows, self.enlarged_per_bucket(), strict=True)
            ],
            # Those that no bucket takes, and those that `skip_image_resolution` leaves out.
            "not_trained": [
                {"image": key, "reason": why, "mend": mend}
                for (key, why), mend in zip(self.left_out, self.mends, strict=True)
            ]
            + [{"image": key, "reason": why, "mend": {}} for key, why in self.read.images.skipped],
        }
        if images:
            entry["image_rows"] = rows
        mode = mode_text(config.enable_bucket, config.bucket_no_upscale)
        title = f"{kind.replace('_', '-')}, {resolution}, {mode}, batch size {config.batch_size}"
        return DatasetPlan(config.number, title, [rule, *self._subset_lines()], entry, below, rows)

    def _subset_lines(self) -> list[str]:
        lines, images = [], self.read.images
        for subset in self.read.config.subsets:
            in_subset = images.subset == subset.number
            times = times_text(np.unique(images.repeats[in_subset]).tolist())
            source = subset.image_dir if subset.metadata_file is None else subset.metadata_file
            count = counted(int(np.count_nonzero(in_subset)), "image")
            lines.append(f"{source}: {count}{times}{', regularization' * subset.is_reg}")
        return lines


def _resolutions(options: AdapterOptions) -> str:
    weights = options.resolution_weights or ("",) * len(options.resolutions or ())
    sizes = [
        f"{w}x{h}" + (f" ({n})" if n else "") for (w, h), n in zip(options.resolutions or (), weights, strict=True)
    ]
    return f"{', '.join(sizes)} ({RESOLUTION_MODES[options.resolution_mode].text})"


def plan_of(
    read: Config, gpus: Sequence[int] | None, accumulate: int | None, images: bool, hint: str,
    progress: Progress | None = None,
) -> Plan:  # fmt: skip
    """The plan of a config, with `images` also of each image.

    `gpus` and `accumulate` are, where not given, what the file says.
    """
    length = read.length or RunLength()
    accumulate = accumulate or length.batches
    seen = overview(read, read.options, [length.processes] if gpus is None else gpus, accumulate, progress)
    datasets = [dataset.shown(seen.options, images) for dataset in seen.datasets]
    unplanned = {dataset.config.number for dataset in read.datasets} - {dataset.number for dataset in datasets}
    head = {"config": str(read.path) if read.path else None}
    return Plan(
        "sd-scripts", read.findings, head, datasets, seen.gpus, seen.options, accumulate, sorted(unplanned),
        read.length, any(dataset.left_out for dataset in seen.datasets), hint,
    )  # fmt: skip


def overview(
    config: Config, options: AdapterOptions | None, gpus: Sequence[int] = (1,), accumulate: int = 1,
    progress: Progress | None = None,
) -> Overview[DatasetOverview]:  # fmt: skip
    """Place and plan what `config` trains, or would train without the mistakes that stop it.

    What the images' headers show to be wrong is added to its findings. Nothing is planned without options.

    Raises:
        KohyaBucketError: options from which no buckets follow, with the dataset's place in the config.
    """
    if options is None:
        bad = name_unreadable(config.datasets, config.findings, progress)
        return Overview(AdapterOptions(), unreadable=frozenset(bad))
    unreadable, stopped = set[str](), bool(config.findings.of(Severity.ERROR))

    def place(i: int) -> DatasetOverview | None:
        dataset = config.datasets[i]
        if stopped and not buckets_follow(dataset.config):
            unreadable.update(name_unreadable([dataset], config.findings, progress))
            return None
        refuse_lost_focus(dataset.config, options, config.release)
        return _place(dataset, options, progress, config.findings, config.programs)

    nothing = "no-images", "no image can be trained, each for its own reason", "see what is listed as not trained"
    places = [dataset.config.place for dataset in config.datasets]
    placed = place_datasets(places, place, config.findings, nothing)
    check_unmatched(options, [data.items.focus for data in placed], config.findings)
    planned = Overview.planned(placed, options, gpus, accumulate, config.findings)
    return replace(planned, unreadable=frozenset(unreadable))


def _place(
    dataset: ReadDataset, options: AdapterOptions, progress: Progress | None, findings: Findings, programs: Programs
) -> DatasetOverview:
    images, keys = dataset.images, dataset.config.dataset_keys
    read = images.sizes(options.metadata_cache, progress)
    stated = check_images(dataset, read.sizes, findings, options.metadata_cache, progress)
    placing = images.place(read, dataset.config.batch_size, keys, options)
    left_out = tuple((images.keys[i], reason) for i, reason in placing.left_out)
    for scan in [read] if stated is None else [read, stated]:
        check_turned(scan.paths, scan.orientation.tolist(), "sd-scripts", dataset.config.place, findings)
    trained = read.sizes[placing.placement.placed]
    without = read.sizes[~placing.placement.placed]
    mends = mends_of(keys, options, without, programs)
    files, skipped = counted(len(placing.trained.keys), "image"), len(images.skipped)
    remark = f", {skipped:,} left out by skip_image_resolution" if skipped else ""
    seen = DatasetOverview(
        placing.trained, dataset, trained, left_out, tuple(mends), name=f"dataset {dataset.config.number}",
        place=dataset.config.place, files=files, remark=remark,
    )  # fmt: skip
    for at in at_resolutions(keys, options):
        check_limits(at, options, trained, dataset.config.place, programs, findings)
    return seen


def mends_of(keys: DatasetKeys, options: AdapterOptions, sizes: IntArray, programs: Programs) -> list[dict[str, Any]]:
    """For each image without a bucket, a key and its value with which it has one; {} where none that is tried does.

    `sizes` are [N, 2] of these images; (0, 0) where unreadable. `programs` are those whose steps are tried.
    """
    mends: list[dict[str, Any]] = [{} for _ in sizes]
    if not len(sizes) or named_rule(options.rule).from_images:
        return mends
    smaller = [s for s in (32, 16, 8) if keys.bucket_reso_steps % s == 0 and s < keys.bucket_reso_steps]
    fitting = [s for s in smaller if not (programs.family and programs.refusing(s))]
    tried: list[dict[str, Any]] = [{"bucket_reso_steps": step} for step in fitting]
    tried = [{"bucket_no_upscale": False}, *tried] if keys.bucket_no_upscale else tried
    for mend in tried:
        rest = [i for i, mend_of_image in enumerate(mends) if not mend_of_image]
        try:
            placed = np.logical_or.reduce([p.placed for p in place_all(replace(keys, **mend), options, sizes[rest])])
        except KohyaBucketError:
            continue
        for k in np.flatnonzero(placed).tolist():
            mends[rest[k]] = mend
    return mends


def check_limits(
    keys: DatasetKeys, options: AdapterOptions, sizes: IntArray, place: str, programs: Programs, findings: Findings
) -> None:
    """Say what a low `max_bucket_reso` costs images of these sizes, [N, 2], at a resolution, and a high
    `min_bucket_reso`, by the rule of the keys and options.
    """
    if not keys.enable_bucket or named_rule(options.rule).own_sizes or not len(sizes):
        return
    resolution, (low, high) = keys.resolution, adjust_to_steps(keys)
    longest = programs.longest(resolution, keys.bucket_reso_steps)
    lowest = narrowest_usual(resolution, keys.bucket_reso_steps)
    at = "at resolution {}x{} ".format(*resolution)
    for is_limit, what, other, usual, code, remedy in (
        (high < longest, f"longer than {high}", longest, replace(keys, max_bucket_reso=longest), "short-buckets",
         f"max_bucket_reso = {longest}"),
        (low > lowest, f"narrower than {low}", lowest, replace(keys, min_bucket_reso=lowest), "wide-buckets",
         f"min_bucket_reso = {lowest}"),
    ):  # fmt: skip
        now, then = (partial(rule_for, one, options, sizes) for one in (keys, usual))
        if is_limit and (cost := limit_cost(f"{at}no bucket is {what}", now(), then, sizes, other)):
            findings.warning(code, place, cost, remedy)


def name_unreadable(datasets: Sequence[ReadDataset], findings: Findings, progress: Progress | None = None) -> set[str]:
    """Add the images of datasets that cannot be planned to the findings if they cannot be read; returns their paths."""
    # What metadata names and is not there has a finding of its own; a link to nothing is one of the folder's files.
    paths = list(dict.fromkeys(path for dataset in datasets for path in dataset.images.paths))
    bad = [(path, why) for _, path, why in scan_sizes(paths, "off", progress).failures if os.path.lexists(path)]
    if bad:
        names = [f"{path}: {why}" for path, why in bad]
        message = f"{counted(len(bad), 'image')} cannot be read ({some(names, 1)})"
        findings.warning("unreadable-image", "", message, repaired(dict(bad)), names)
    return {path for path, _ in bad}


def check_images(
    dataset: ReadDataset, sizes: IntArray, findings: Findings, metadata_cache: str = "auto",
    progress: Progress | None = None,
) -> SizeScan | None:  # fmt: skip
    """Compare what the config and its metadata say with the files.

    `sizes` are [N, 2] those that the images are placed by: stated ones, or read ones; 0 where unreadable. Returns what
    the headers say of the images whose sizes are stated.
    """
    images, scan = dataset.images, None
    stated = np.flatnonzero(images.stated_sizes.min(axis=1, initial=1) > 0)
    if len(stated):
        scan = scan_sizes([images.paths[i] for i in stated], metadata_cache, progress)
        _check_stated(dataset, stated, scan.sizes, findings)
    if images.conditioning:
        control = scan_sizes(images.conditioning, metadata_cache, progress).sizes
        _check_control(dataset, sizes, control, findings)
    if not dataset.config.enable_bucket:
        _check_one_size(dataset, sizes, findings)
    return scan


def _check_stated(dataset: ReadDataset, rows: npt.NDArray[np.intp], true: IntArray, findings: Findings) -> None:
    images, where = dataset.images, dataset.config.place
    unreadable = [images.keys[i] for i, size in zip(rows.tolist(), true.tolist(), strict=True) if not size[0]]
    if unreadable:
        count = counted(len(unreadable), "image")
        message = f"{count} with a size in the metadata cannot be read, and sd-scripts stops there"
        findings.error("unreadable-image", where, f"{message} ({some(unreadable)})", "replace or remove", unreadable)
    differs = (true[:, 0] > 0) & (true != images.stated_sizes[rows]).any(axis=1)
    if differs.any():
        names = [images.keys[i] for i in rows[differs].tolist()]
        first = rows[differs][0]
        said = "x".join(map(str, images.stated_sizes[first].tolist()))
        is_now = "x".join(map(str, true[differs][0].tolist()))
        message = (
            f"{counted(len(names), 'image')} with a different size than the metadata says, so sd-scripts distorts them "
            f"({images.keys[first]}: {said} stated, {is_now} in fact)"
        )
        findings.warning("stated-size", where, message, "write the metadata again", names)


def _check_control(dataset: ReadDataset, sizes: IntArray, control: IntArray, findings: Findings) -> None:
    images = dataset.images
    wanted = np.array([bool(path) for path in images.conditioning])
    wrong = np.flatnonzero(wanted & (sizes[:, 0] > 0) & (sizes != control).any(axis=1))
    if len(wrong) and dataset.config.enable_bucket:
        i = int(wrong[0])
        names = [images.conditioning[k] for k in wrong.tolist()]
        shown = "x".join(map(str, control[i].tolist())) if control[i][0] else "unreadable"
        message = f"{counted(len(names), 'control image', 'has', 'have')} a different size than their image, and "
        message += f"sd-scripts stops there ({names[0]}: {shown}, its image {'x'.join(map(str, sizes[i].tolist()))})"
        findings.error("control-size", dataset.config.place, message, "make the sizes equal", names)


def _check_one_size(dataset: ReadDataset, sizes: IntArray, findings: Findings) -> None:
    config, images = dataset.config, dataset.images
    if config.resolution is None or any(s.random_crop or s.face_crop_aug_range for s in config.subsets):
        return
    other = np.flatnonzero((sizes[:, 0] > 0) & (sizes != np.array(config.resolution)).any(axis=1))
    if len(other):
        names = [images.keys[i] for i in other.tolist()]
        width, height = config.resolution
        message = (
            f"{counted(len(names), 'image')} with a different size than {width}x{height}: without enable_bucket "
            "sd-scripts stops at the first of them, unless latents are cached"
        )
        findings.warning("not-this-size", config.place, message, "set enable_bucket = true", names)
