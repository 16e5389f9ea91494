"""The images of a DreamBooth dataset. Source: sd-scripts' `DreamBoothDataset.__init__`."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.sdscripts.config.files import (
    CACHE_FILE,
    Folder,
    are_stated_truly,
    check_stems,
    missing_folder,
    note_ignored,
    read_captions,
    read_folder,
    skipped_images,
    supported_extensions,
    warn_of_skips,
    written_ns,
)
from kohya_bucket.sdscripts.config.keys import Change, DatasetConfig, SubsetConfig
from kohya_bucket.sdscripts.config.model import DatasetTable, Entry, Reading, Registry, is_used
from kohya_bucket.texts import counted, some

__all__ = ["balanced", "list_controlnet", "list_dreambooth", "split"]


class _Listed(NamedTuple):
    """An image; `noted` is its size in a `metadata_cache.json`, to be `trusted` or not."""

    path: str
    noted: tuple[int, int] | None = None
    trusted: bool = True
    caption: str | None = None


def list_dreambooth(dataset: DatasetConfig, reading: Reading, training: bool = True) -> Registry:
    """The images, regularization images after the others, each as often as sd-scripts repeats it."""
    registry = Registry()
    regular: list[Entry] = []
    wanted = 0
    # Findings about folders belong to the training pass; a second pass would repeat them.
    quiet = reading if training else replace(reading, findings=Findings())
    seen: set[str | None] = set()
    for subset in dataset.subsets:
        if not is_used(subset, seen, training, quiet.findings):
            continue
        images = _images_of(subset, dataset, registry, quiet, training)
        if images:
            seen.add(subset.source)
        repeats = subset.num_repeats if training else 1
        wanted += 0 if subset.is_reg else repeats * len(images)
        for image in images:
            size = image.noted if image.trusted else None
            entry = Entry(image.path, image.path, repeats, subset.number, size, subset.is_reg, image.caption)
            if subset.is_reg:
                regular.append(entry)
            else:
                registry.add(entry)
    for entry, count in zip(regular, balanced([e.repeats for e in regular], wanted), strict=True):
        if count:
            registry.add(replace(entry, repeats=count))
    if training:
        _report_regularization(dataset, regular, wanted, quiet.findings)
    return registry


def as_list(dataset: DatasetConfig, reading: Reading, training: bool = True) -> DatasetTable:
    """The finished list."""
    registry = list_dreambooth(dataset, reading, training)
    if training:
        registry.report(dataset.subsets, reading.findings)
    return registry.as_list()


def _images_of(
    subset: SubsetConfig, dataset: DatasetConfig, registry: Registry, reading: Reading, training: bool
) -> list[_Listed]:
    findings, where = reading.findings, subset.place
    if subset.image_dir is None:
        return []
    if not os.path.isdir(subset.image_dir):
        missing_folder("image_dir", subset.image_dir, findings, where, reading.base)
        return []
    try:
        folder = read_folder(subset.image_dir)
    except OSError as error:
        findings.error("unreadable-folder", where, f"{subset.image_dir!r} cannot be listed: {error.strerror}")
        return []
    note_ignored(folder, findings, where)
    images = _cached(subset, folder, dataset, reading) if subset.cache_info else None
    fresh = images is None
    images = [_Listed(path) for path in folder.images] if images is None else images
    if not images:
        _report_empty(subset, folder, dataset, findings)
        return []
    images = _large_enough(images, dataset, subset, registry, reading)
    paths = [image.path for image in images]
    if fresh and reading.captions:
        captions = read_captions(paths, folder.names, subset, findings)
        images = [_Listed(path, caption=caption) for path, caption in zip(paths, captions, strict=True)]
    check_stems(paths, where, findings)
    # a share above 1 trains nothing, as in sd-scripts; an infinite one, at which it stops, is reported with the values
    if 0 < dataset.validation_split < math.inf:
        if subset.is_reg:
            images = images if training else []
        else:
            _report_cache_and_split(subset, fresh, reading)
            images = split(images, dataset.validation_split, dataset.validation_seed, training)
    if fresh and subset.cache_info:
        reading.written_caches[_cache_path(subset)] = images
    return images


def _large_enough(
    images: list[_Listed], dataset: DatasetConfig, subset: SubsetConfig, registry: Registry, reading: Reading
) -> list[_Listed]:
    """Those that `skip_image_resolution` does not leave out, by their sizes in a `metadata_cache.json` where one is."""
    paths = [image.path for image in images]
    noted = [image.noted for image in images]
    skips = skipped_images(paths, noted, dataset.skip_image_resolution, reading.metadata_cache)
    warn_of_skips(paths, skips, dataset, subset, reading.findings)
    registry.skipped += [(paths[i], reason) for i, reason in skips.reasons.items()]
    return [image for i, image in enumerate(images) if i not in skips]


# -- metadata_cache.json -----------------------------------------------------------------------------


def _cache_path(subset: SubsetConfig) -> str:
    return os.path.join(subset.image_dir or "", CACHE_FILE)


def _cached(subset: SubsetConfig, folder: Folder, dataset: DatasetConfig, reading: Reading) -> list[_Listed] | None:
    """The images that a `metadata_cache.json` lists, with their stated sizes; None where there is none yet."""
    path = _cache_path(subset)
    if path in reading.written_caches:
        return list(reading.written_caches[path])
    if not os.path.isfile(path):
        return None
    findings, where = reading.findings, subset.place
    noted: dict[str, tuple[int, int]] = {}
    captions: dict[str, str] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for image, entry in json.load(file).items():
                width, height = entry["resolution"]
                noted[image] = int(width), int(height)
                if max(noted[image]) >= 1 << 31:
                    raise ValueError(f"{image} has the resolution {entry['resolution']}")
                captions[image] = str(entry["caption"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        message = f"{path} is not usable ({type(error).__name__}: {error}), and sd-scripts stops at it"
        findings.error("broken-cache", where, message, "delete it; it is written again", (path,))
        return [_Listed(image) for image in folder.images]
    truly = are_stated_truly(list(noted), [written_ns(path)] * len(noted))
    listed = {os.path.abspath(image) for image in noted}
    new = [image for image in folder.images if os.path.abspath(image) not in listed]
    small = skipped_images(new, [None] * len(new), dataset.skip_image_resolution, reading.metadata_cache)
    new = [image for i, image in enumerate(new) if i not in small]
    if new:
        message = (
            f"{counted(len(new), 'image', 'is', 'are')} not in {path}, so sd-scripts does not train "
            f"{'it' if len(new) == 1 else 'them'} ({some(new)})"
        )
        findings.warning("stale-cache", where, message, "delete the file; it is written again", new)
    present = {os.path.abspath(image) for image in folder.images}
    gone = [i for i in noted if os.path.abspath(i) not in present and not os.path.exists(i)]
    if gone:
        message = (
            f"{counted(len(gone), 'image')} listed in {path} {'does' if len(gone) == 1 else 'do'} not exist "
            f"({some(gone)})"
        )
        findings.error("missing-image", where, message, "delete the file; it is written again", gone)
    sizes = zip(noted.items(), truly, strict=True)
    return [_Listed(image, size, true, captions[image]) for (image, size), true in sizes]


def _report_cache_and_split(subset: SubsetConfig, fresh: bool, reading: Reading) -> None:
    if not subset.cache_info:
        return
    remedy = "set cache_info = false"
    if Change.SKIPPING not in reading.release:
        message = "cache_info with validation_split: sd-scripts gives images the captions of others"
        reading.findings.warning("cache-and-split", subset.place, message, remedy)
    elif fresh:
        message = (
            f"cache_info with validation_split: sd-scripts writes the training part into {_cache_path(subset)}, takes "
            "the images to validate on from it, and later runs train a part of that part"
        )
        reading.findings.warning("cache-and-split", subset.place, message, remedy)


# -- what is said about it ---------------------------------------------------------------------------


def _report_empty(subset: SubsetConfig, folder: Folder, dataset: DatasetConfig, findings: Findings) -> None:
    message = f"image_dir {folder.path!r} holds no image"
    remedy = "sd-scripts reads .png, .jpg, .jpeg, .webp and .bmp"
    inside = next((name for name in folder.folders if _holds_images(os.path.join(folder.path, name))), None)
    if inside is not None:
        message += " itself"
        remedy = f"subfolders are not searched; did you mean {os.path.join(folder.path, inside)!r}?"
    elif dataset.validation_split > 0 and not subset.is_reg:
        message += ", and with validation_split sd-scripts stops at an empty folder"
    findings.error("empty-folder", subset.place, message, remedy, (folder.path,))


def _holds_images(path: str) -> bool:
    try:
        return bool(read_folder(path).images)
    except OSError:
        return False


def _report_regularization(dataset: DatasetConfig, regular: list[Entry], wanted: int, findings: Findings) -> None:
    available = sum(e.repeats for e in regular)
    if regular and wanted < available:
        unused = sum(1 for n in balanced([e.repeats for e in regular], wanted) if n == 0)
        message = (
            f"{available} regularization samples meet {wanted} training samples: sd-scripts uses the first ones, "
            f"and the last {unused} of {len(regular)} regularization images in no epoch"
        )
        findings.note("unused-regularization", dataset.place, message, "raise num_repeats of the training images")


# The pairs of a ControlNet dataset. Source: sd-scripts' `ControlNetDataset.__init__`.
#
# The images are listed as DreamBooth images; each needs a control image of the same name, whatever its extension.
# Before 0.10.2 every control image had to belong to one.


def list_controlnet(dataset: DatasetConfig, reading: Reading) -> DatasetTable:
    """The images with their control images."""
    registry = list_dreambooth(dataset, reading)
    registry.report(dataset.subsets, reading.findings)
    by_folder: dict[str | None, SubsetConfig] = {}
    for subset in dataset.subsets:
        by_folder.setdefault(subset.image_dir, subset)
        if subset.random_crop:
            message = "random_crop is set, which sd-scripts refuses for ControlNet datasets"
            reading.findings.error("random-crop", subset.place, message, "remove it")
    folders = _control_folders(dataset, reading)
    extensions = sorted(supported_extensions())
    paired: set[str] = set()
    missing: dict[int, list[str]] = {}
    for entry in registry.entries.values():
        subset = by_folder[dataset.subsets[entry.subset - 1].image_dir]
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
    _report_missing(missing, dataset, reading)
    _report_extra(folders, paired, dataset, reading)
    return registry.as_list()


def _control_folders(dataset: DatasetConfig, reading: Reading) -> dict[str, Folder]:
    out: dict[str, Folder] = {}
    for subset in dataset.subsets:
        path = subset.conditioning_data_dir
        if path is None or path in out:
            continue
        if os.path.isdir(path):
            out[path] = read_folder(path)
        else:
            missing_folder("conditioning_data_dir", path, reading.findings, subset.place, reading.base)
    return out


def _report_missing(missing: dict[int, list[str]], dataset: DatasetConfig, reading: Reading) -> None:
    for number, names in missing.items():
        subset = dataset.subsets[number - 1]
        message = (
            f"{counted(len(names), 'image', 'has', 'have')} no control image of the same name in "
            f"{subset.conditioning_data_dir!r}, "
            f"and sd-scripts stops at that ({some(names)})"
        )
        reading.findings.error("missing-control-image", subset.place, message, "add them or remove the images", names)


def _report_extra(folders: dict[str, Folder], paired: set[str], dataset: DatasetConfig, reading: Reading) -> None:
    if Change.SKIPPING in reading.release:
        return
    for path, folder in folders.items():
        extra = [p for p in folder.images if os.path.splitext(os.path.abspath(p))[0] not in paired]
        if extra:
            message = (
                f"{counted(len(extra), 'control image', 'has', 'have')} no image in {path!r} that is trained, and "
                f"sd-scripts stops at that; images held back for validation count as none ({some(extra)})"
            )
            reading.findings.error("extra-control-image", dataset.place, message, "remove them", extra)


# How often regularization images are repeated. Source: the end of sd-scripts' `DreamBoothDataset.__init__`.


def balanced(repeats: Sequence[int], wanted: int) -> list[int]:
    """How often each regularization image is trained, so that together they are trained `wanted` times.

    The images are taken in order, each with its own repeats, until `wanted` is reached; those beyond are not
    trained (0). If all are taken and it is not reached, each gets one more, in turn.

    Args:
        repeats: each image's own repeats, 1 or more.
        wanted: training images, counted with repeats.
    """
    out = [0] * len(repeats)
    count = 0
    for i, own in enumerate(repeats):
        if count >= wanted:
            return out
        out[i] = own
        count += own
    if not out:
        return out
    whole, rest = divmod(max(0, wanted - count), len(out))
    return [n + whole + (i < rest) for i, n in enumerate(out)]


# Which images are held back for validation. Source: sd-scripts' `split_train_val`.


T = TypeVar("T")


def split(items: Sequence[T], share: float, seed: int | None, training: bool) -> list[T]:
    """The training or the validation part, in sd-scripts' order: both come from one shuffled list.

    Both parts are rounded up at .5, so that an image can be in both. Without a seed sd-scripts shuffles from the
    global random state, once for each part; here seed 0 is used.
    """
    shuffled = list(items)
    random.Random(0 if seed is None else seed).shuffle(shuffled)
    if training:
        return shuffled[0 : math.ceil(len(shuffled) * (1 - share))]
    return shuffled[len(shuffled) - round(len(shuffled) * share) :]
