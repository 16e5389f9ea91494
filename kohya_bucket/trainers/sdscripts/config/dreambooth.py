"""The images of a DreamBooth dataset. Source: sd-scripts' `DreamBoothDataset.__init__`."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from kohya_bucket.checks import quoted
from kohya_bucket.errors import may_pass
from kohya_bucket.inputs import MAX_TABLE_BYTES, read_input
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.file_findings import note_subfolders
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.sdscripts.config.caches import check_captions
from kohya_bucket.trainers.sdscripts.config.files import (
    READ_AGAIN,
    check_stems,
    missing_folder,
    note_ignored,
    read_captions,
)
from kohya_bucket.trainers.sdscripts.config.keys import DatasetConfig, SubsetConfig
from kohya_bucket.trainers.sdscripts.config.model import Entry, ReadContext, Registry, is_used, large_enough
from kohya_bucket.trainers.sdscripts.config.releases import Feature
from kohya_bucket.trainers.sdscripts.dataset_images import (
    CACHE_FILE,
    Folder,
    are_stated_truly,
    read_folder,
    skipped_images,
    supported_extensions,
    written_ns,
)


def list_dreambooth(dataset: DatasetConfig, reading: ReadContext, training: bool = True) -> Registry:
    """The images that are trained, or those that are held back for validation.

    Regularization images are after the others, each as often as sd-scripts repeats it.
    """
    registry = Registry()
    ordinary: list[Entry] = []
    regular: list[Entry] = []
    seen: set[str | None] = set()
    for subset in dataset.subsets:
        if not is_used(subset, seen, training, reading.findings):
            continue
        images = _images_of(subset, dataset, registry, reading, training)
        if images:
            seen.add(subset.source)
        repeats = subset.num_repeats if training else 1
        for entry in images:
            entry.repeats, entry.subset, entry.is_reg = repeats, subset.number, subset.is_reg
        (regular if subset.is_reg else ordinary).extend(images)
    # Regularization images are repeated, or left out, until there are as many as training images.
    wanted = sum(entry.repeats for entry in ordinary)
    counts = balanced([entry.repeats for entry in regular], wanted)
    for entry in ordinary:
        registry.add(entry)
    for entry, count in zip(regular, counts, strict=True):
        if count:
            entry.repeats = count
            registry.add(entry)
    if 0 in counts:
        message = (
            f"{sum(entry.repeats for entry in regular)} regularization samples meet {wanted} training samples: "
            f"sd-scripts uses the first ones, and the last {counts.count(0)} of {len(regular)} regularization images "
            "in no epoch"
        )
        remedy = "raise num_repeats of the training images"
        reading.findings.note("unused-regularization", dataset.place, message, remedy)
    registry.report(dataset.subsets, reading.findings)
    return registry


def _images_of(
    subset: SubsetConfig, dataset: DatasetConfig, registry: Registry, reading: ReadContext, training: bool
) -> list[Entry]:
    """The images of a subset that are trained, or held back."""
    findings, where = reading.findings, subset.place
    if subset.image_dir is None:
        return []
    if not os.path.isdir(subset.image_dir):
        missing_folder("image_dir", subset.image_dir, findings, where, reading.base)
        return []
    try:
        folder = read_folder(subset.image_dir)
    except OSError as error:
        findings.error("unreadable-folder", where, f"{quoted(subset.image_dir)} cannot be listed: {error.strerror}")
        return []
    note_ignored(folder, findings, where)
    # Which images there are: those of its metadata cache, where one is used, or else of the folder.
    cache = os.path.join(subset.image_dir, CACHE_FILE)
    images = _cached(cache, subset, folder, dataset, reading) if subset.cache_info else None
    from_folder = images is None
    images = [Entry(path, path) for path in folder.images] if images is None else images
    if not images:
        _report_empty(subset, folder, dataset, findings)
        return []
    _note_subfolders(folder, where, reading)
    images, _ = large_enough(images, dataset, subset, registry, reading)
    paths = [image.path for image in images]
    if not from_folder:  # the sizes in the file decide what is left out, but not all are believed beyond
        are_true = are_stated_truly(paths, [written_ns(cache)] * len(paths))
        images = [image if true else replace(image, size=None) for image, true in zip(images, are_true, strict=True)]
        if reading.captions:
            check_captions(dataset, subset, [(image.path, image.caption) for image in images], (), findings)
    elif reading.captions:
        for image, caption in zip(images, read_captions(dataset, subset, paths, findings), strict=True):
            image.caption = caption
    check_stems(paths, where, findings)
    # Which of them are trained and which are held back. A share above 1 trains nothing, as in sd-scripts; one at which
    # it overflows and stops is reported with the values.
    if 0 < dataset.validation_split * len(images) < math.inf:
        if subset.is_reg:
            images = images if training else []
        else:
            if subset.cache_info:
                _report_cache_and_split(subset, cache, from_folder, reading)
            images = _trained_or_held_back(images, dataset, where, findings, training)
    # What sd-scripts writes into the cache now, later datasets of this config read from it.
    if from_folder and subset.cache_info:
        reading.written_caches[cache] = images
    return images


def _cached(
    path: str, subset: SubsetConfig, folder: Folder, dataset: DatasetConfig, reading: ReadContext
) -> list[Entry] | None:
    """The images that a `metadata_cache.json` lists, with their sizes in it; None where there is none yet."""
    if path in reading.written_caches:
        return [replace(entry) for entry in reading.written_caches[path]]  # each dataset has repeats of its own
    if not os.path.isfile(path):
        return None
    findings, where, remedy = reading.findings, subset.place, "delete the file; it is written again"
    listed = []
    try:
        for image, entry in json.loads(read_input(path, MAX_TABLE_BYTES).decode("utf-8")).items():
            width, height = entry["resolution"]
            size = int(width), int(height)
            if max(size) >= 1 << 31:
                raise ValueError(f"{image} has the resolution {entry['resolution']}")
            listed.append(Entry(image, image, size=size, caption=str(entry["caption"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        message = f"{path} is not usable ({type(error).__name__}: {error}), and sd-scripts stops at it"
        remedy = READ_AGAIN if may_pass(error) else remedy
        findings.error("broken-cache", where, message, remedy, (path,))
        return [Entry(image, image) for image in folder.images]
    in_file, present = ({os.path.abspath(p) for p in paths} for paths in ([e.path for e in listed], folder.images))
    new = [image for image in folder.images if os.path.abspath(image) not in in_file]
    small = skipped_images(new, [None] * len(new), dataset.skip_image_resolution, reading.metadata_cache)
    new = [image for i, image in enumerate(new) if i not in small.reasons]
    if new:
        message = f"{counted(len(new), 'image', 'is', 'are')} not in {path}, and so not trained ({some(new)})"
        findings.warning("stale-cache", where, message, remedy, new)
    gone = [e.path for e in listed if os.path.abspath(e.path) not in present and not os.path.exists(e.path)]
    if gone:
        message = f"{counted(len(gone), 'image')} listed in {path} cannot be found ({some(gone)})"
        findings.error("missing-image", where, message, remedy, gone)
    return listed


def _trained_or_held_back(
    images: list[Entry], dataset: DatasetConfig, where: str, findings: Findings, training: bool
) -> list[Entry]:
    share, seed = dataset.validation_split, dataset.validation_seed
    trained, held = (split(images, share, seed, part) for part in (True, False))
    held_paths = {entry.path for entry in held}
    both = [entry.path for entry in trained if entry.path in held_paths]
    if both and training and seed is not None:
        message = (
            f"validation_split {share:g} of {counted(len(images), 'image')}: {len(trained):,} are trained and "
            f"{len(held):,} held back, as sd-scripts rounds, so {counted(len(both), 'image', 'is', 'are')} in both "
            f"({some(both, 2)})"
        )
        findings.warning("validation-overlap", where, message, "choose another share", both)
    return trained if training else held


def _report_cache_and_split(subset: SubsetConfig, cache: str, is_written: bool, reading: ReadContext) -> None:
    message = "cache_info with validation_split: sd-scripts "
    if Feature.SKIPPING not in reading.release:
        message += "gives images the captions of others"
    elif is_written:
        message += (
            f"writes the training part into {cache}, takes the images to validate on from it, and later runs train a "
            "part of that part"
        )
    else:
        return
    reading.findings.warning("cache-and-split", subset.place, message, "set cache_info = false")


def _report_empty(subset: SubsetConfig, folder: Folder, dataset: DatasetConfig, findings: Findings) -> None:
    message = f"image_dir {quoted(folder.path)} holds no image"
    remedy = "sd-scripts reads .png, .jpg, .jpeg, .webp and .bmp"
    inside = ""
    for path in (os.path.join(folder.path, name) for name in folder.folders):
        with suppress(OSError):
            inside = inside or (path if read_folder(path).images else "")
    if inside:
        message += " itself"
        remedy = f"subfolders are not searched; did you mean {inside!r}?"
    elif dataset.validation_split > 0 and not subset.is_reg:
        message += ", and with validation_split sd-scripts stops at an empty folder"
    findings.error("empty-folder", subset.place, message, remedy, (folder.path,))


def _note_subfolders(folder: Folder, where: str, reading: ReadContext) -> None:
    """Name images in subfolders that are no folders of the config: sd-scripts does not search subfolders."""
    paths = []
    for path in (os.path.join(folder.path, name) for name in folder.folders):
        if os.path.realpath(path) not in reading.named_folders:
            with suppress(OSError):
                paths += read_folder(path).images
    note_subfolders(paths, "sd-scripts", where, "[[datasets.subsets]]", reading.findings)


# The pairs of a ControlNet dataset. Source: sd-scripts' `ControlNetDataset.__init__`.
#
# The images are listed as DreamBooth images; each needs a control image of the same name, whatever its extension.
# Before 0.10.2 every control image had to belong to one.


def list_controlnet(dataset: DatasetConfig, reading: ReadContext) -> Registry:
    """The images with their control images."""
    registry = list_dreambooth(dataset, reading)
    first_of_folder: dict[str | None, SubsetConfig] = {}
    folders: dict[str, Folder] = {}
    for subset in dataset.subsets:
        first_of_folder.setdefault(subset.image_dir, subset)
        if subset.random_crop:
            message = "random_crop is set, which sd-scripts refuses for ControlNet datasets"
            reading.findings.error("random-crop", subset.place, message, "remove it")
        path = subset.conditioning_data_dir
        if path is not None and path not in folders:
            if os.path.isdir(path):
                folders[path] = read_folder(path)
            else:
                missing_folder("conditioning_data_dir", path, reading.findings, subset.place, reading.base)
    extensions = sorted(supported_extensions())
    paired: set[str] = set()
    missing: dict[int, list[str]] = {}
    for entry in registry.entries.values():
        # As sd-scripts, which looks for the first subset of the image's folder.
        subset = first_of_folder[dataset.subsets[entry.subset - 1].image_dir]
        folder = folders.get(subset.conditioning_data_dir or "")
        if folder is None:
            continue
        name = os.path.splitext(os.path.basename(entry.path))[0]
        match = next((name + e for e in extensions if name + e in folder.names), None)
        if match is None:
            missing.setdefault(subset.number, []).append(name)
            continue
        entry.conditioning = os.path.abspath(os.path.join(folder.path, match))
        paired.add(os.path.splitext(entry.conditioning)[0])
    for number, names in missing.items():
        subset = dataset.subsets[number - 1]
        message = (
            f"{counted(len(names), 'image', 'has', 'have')} no control image of the same name in "
            f"{quoted(subset.conditioning_data_dir)}, and sd-scripts stops at that ({some(names)})"
        )
        reading.findings.error("missing-control-image", subset.place, message, "add them or remove the images", names)
    for folder in folders.values() if Feature.SKIPPING not in reading.release else ():
        extra = [path for path in folder.images if os.path.splitext(os.path.abspath(path))[0] not in paired]
        if extra:
            message = (
                f"{counted(len(extra), 'control image', 'has', 'have')} no image in {quoted(folder.path)} that is "
                f"trained, and sd-scripts stops at that; images held back for validation count as none ({some(extra)})"
            )
            reading.findings.error("extra-control-image", dataset.place, message, "remove them", extra)
    return registry


# How often regularization images are repeated. Source: the end of sd-scripts' `DreamBoothDataset.__init__`.


def balanced(repeats: Sequence[int], wanted: int) -> list[int]:
    """How often each regularization image is trained, so that together they are trained `wanted` times.

    The images are taken in order, each with its own repeats, until `wanted` is reached; those beyond are not
    trained (0). If all are taken and it is not reached, each gets one more, in turn.

    Args:
        repeats: each image's own repeats, 1 or more.
        wanted: training images, counted with repeats.
    """
    before = [0, *itertools.accumulate(repeats)]
    out = [times if count < wanted else 0 for times, count in zip(repeats, before, strict=False)]
    whole, rest = divmod(max(0, wanted - before[-1]), max(1, len(out)))
    return [n + whole + (i < rest) for i, n in enumerate(out)]


# Which images are held back for validation. Source: sd-scripts' `split_train_val`.


T = TypeVar("T")


def split(items: Sequence[T], share: float, seed: int | None, training: bool) -> list[T]:
    """The training or the validation part, in sd-scripts' order: both come from one shuffled list.

    The training part is rounded up and the other one to the nearest number, so that an image can be in both. Without a
    seed sd-scripts shuffles from the global random state, once for each part; here seed 0 is used.
    """
    shuffled = list(items)
    random.Random(0 if seed is None else seed).shuffle(shuffled)
    if training:
        return shuffled[0 : math.ceil(len(shuffled) * (1 - share))]
    return shuffled[len(shuffled) - round(len(shuffled) * share) :]
