"""What reports and the explorer are about: a config's datasets with the sizes of their images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from kohya_bucket.errors import ConfigError
from kohya_bucket.images import SizeScan
from kohya_bucket.trainers.door.dataset_keys import at_resolutions, rule_for
from kohya_bucket.trainers.door.file_findings import check_turned
from kohya_bucket.trainers.door.findings import Finding
from kohya_bucket.trainers.door.options import required
from kohya_bucket.trainers.door.placed import focus_of
from kohya_bucket.trainers.door.placing import refuse_conflicts
from kohya_bucket.trainers.door.subject import TRANSPARENT, Epoch, Explored, HeaderReader, ImageTable, Subject
from kohya_bucket.trainers.sdscripts.config import Config, ReadDataset
from kohya_bucket.trainers.sdscripts.config.model import refuse_lost_focus
from kohya_bucket.trainers.sdscripts.dataset_images import refuse_random_crops
from kohya_bucket.trainers.sdscripts.plan import check_limits


def subjects_of(
    path: Path, config: Config, batch_size: int | None, reader: HeaderReader
) -> tuple[list[Subject], list[Finding]]:
    """Every dataset of a config that can be trained, at each of its resolutions, and what is wrong with the config."""
    read = _with_images(path, config, reader)
    options = required(config.options, config.findings, config.path)
    placed = []
    for dataset, images in read:
        refuse_lost_focus(dataset.config, options, config.release)
        batch = batch_size or dataset.config.batch_size
        scan = SizeScan.stated(images.paths, images.sizes)
        placed.append(dataset.images.place(scan, batch, dataset.config.dataset_keys, options))
    subjects = []
    for number, (dataset, images) in enumerate(read):
        focus = focus_of(options, images.paths)
        name = f"{path.stem}, dataset {dataset.config.number}" if len(read) > 1 else path.stem
        for at, keys in enumerate(at_resolutions(dataset.config.dataset_keys, options)):
            title = f"{name}, {keys.resolution[0]}x{keys.resolution[1]}" if options.resolutions else name
            rule, batch = rule_for(keys, options, images.sizes), batch_size or dataset.config.batch_size
            sizes = images.sizes[images.readable]
            check_limits(keys, options, sizes, dataset.config.place, config.programs, config.findings)
            epoch = Epoch(tuple(placed), number, at)
            how = str(path), config.programs, None, focus, options, epoch
            subjects.append(Subject(title, images, rule, batch, *how))
    return subjects, config.findings.serious


def explored(path: Path, config: Config, reader: HeaderReader) -> Explored:
    """What the explorer's page begins with.

    Raises:
        ConfigError: no dataset has images, or their crops cannot keep the focus.
    """
    read = _with_images(path, config, reader)
    options = required(config.options, config.findings, config.path)
    tables, focus, first = [images for _, images in read], None, read[0][0]
    if options.focus:
        for dataset, _ in read:
            refuse_random_crops(dataset.config.subsets, options)
            refuse_conflicts(dataset.config.dataset_keys, options)
        rectangles = [focus_of(options, images.paths) for images in tables]
        focus = options.focus, [of_table for of_table in rectangles if of_table is not None]
    return Explored(
        tables, config.findings.serious, focus, config.path, [dataset.config.number - 1 for dataset, _ in read],
        first.config.dataset_keys, first.config.batch_size, first.images.is_reg,
    )  # fmt: skip


def _with_images(path: Path, config: Config, reader: HeaderReader) -> list[tuple[ReadDataset, ImageTable]]:
    """The datasets that can be trained, with their images; `ConfigError` where there is none."""
    usable = [one for one in config.datasets if len(one.images) and one.config.resolution is not None]
    if not usable:
        reasons = "; ".join(finding.text for finding in config.findings.serious[:3])
        raise ConfigError(f"{path}: no dataset with images and a resolution in it: {reasons or 'see its folders'}")
    # A file of several datasets is read once.
    paths = list(dict.fromkeys(path for dataset in usable for path in dataset.images.paths))
    headers = reader.table(paths)
    decoded = reader.decoded(headers)
    broken = {paths[i]: why for i, why in decoded.failures.items() if i not in headers.failures}
    row_of = {name: i for i, name in enumerate(paths)}
    read = []
    for dataset in usable:
        images = decoded.take(np.array([row_of[name] for name in dataset.images.paths], dtype=np.intp))
        stated = dataset.images.stated_sizes
        is_stated = stated.min(axis=1, initial=1) > 0
        endings = tuple(dict.fromkeys(s.caption_extension for s in dataset.config.subsets if s.caption_extension))
        masked = [dataset.config.subsets[number - 1].alpha_mask for number in dataset.images.subset.tolist()]
        images = replace(
            images, repeats=dataset.images.repeats, captions=endings or images.captions,
            # sd-scripts trusts the sizes that metadata states.
            sizes=np.where(is_stated[:, None], stated, images.sizes).astype(np.int32),
            failures={i: why for i, why in images.failures.items() if not is_stated[i]},
            misread={i: why for i, why in images.misread.items() if why != TRANSPARENT or not masked[i]},
        )  # fmt: skip
        check_turned(images.paths, images.orientation.tolist(), "sd-scripts", dataset.config.place, config.findings)
        read.append((dataset, images.without(broken)))
    return read
