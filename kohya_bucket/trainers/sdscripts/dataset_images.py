"""The images of a dataset: which files of a folder there are, which are left out, and all of one dataset in a table.

Source: sd-scripts' `IMAGE_EXTENSIONS` and `glob_images`: one level, no hidden files, extensions in all lower or all
upper case (on Windows in any case), sorted by path.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray, Size
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.formats import is_listed
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.scan import STAT, Job
from kohya_bucket.images.sizes import SizeScan
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import PlacedDataset
from kohya_bucket.trainers.door.placing import place_images
from kohya_bucket.trainers.door.sizes import scan_sizes

_ALWAYS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# by extension: what to install, and the modules with which sd-scripts reads it
WITH_PLUGIN = {
    ".avif": ("pillow-avif-plugin", ("pillow_avif",)),
    ".jxl": ("pillow-jxl-plugin", ("pillow_jxl", "jxlpy")),
}
_NOT_READ = frozenset(
    {".gif", ".tif", ".tiff", ".heic", ".heif", ".jfif", ".jpe", ".jp2", ".psd", ".tga", *WITH_PLUGIN}
)


@lru_cache(maxsize=1)
def supported_extensions() -> frozenset[str]:
    """The extensions that sd-scripts reads in this environment: AVIF and JPEG XL need their plugins."""
    plugins = [e for e, (_, modules) in WITH_PLUGIN.items() if any(map(importlib.util.find_spec, modules))]
    return frozenset(case(e) for e in (*_ALWAYS, *plugins) for case in (str.lower, str.upper))


def image_named(name: str) -> str | None:
    """The image whose path is `name` and an extension: of several, the one that sd-scripts takes."""
    return next((name + e for e in sorted(supported_extensions()) if os.path.lexists(name + e)), None)


@dataclass(frozen=True)
class Folder:
    """One folder's content.

    Attributes:
        path: the folder, as the config spells it.
        images: paths of its images in sd-scripts' order.
        names: the names of all its entries.
        ignored: names that look like images and are not read.
        folders: names of its subfolders.
    """

    path: str
    images: list[str] = field(default_factory=list)
    names: frozenset[str] = frozenset()
    ignored: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


def read_folder(path: str, extensions: Collection[str] | None = None) -> Folder:
    """List a folder. Nothing is opened.

    Args:
        extensions: of images; by default those that sd-scripts reads here.

    Raises:
        OSError: the folder cannot be listed.
    """
    read = supported_extensions() if extensions is None else frozenset(extensions)
    # The prefix that glob gives its results: without doubled or trailing separators.
    prefix = os.path.split(os.path.join(path, "*"))[0]
    start = os.path.join(prefix, "")
    names, images, ignored, folders = [], [], [], []
    with os.scandir(prefix or os.curdir) as entries:
        for entry in entries:
            name = entry.name
            names.append(name)
            if not is_listed(name):
                continue
            extension = name[dot:] if (dot := name.rfind(".")) > 0 else ""
            lower = extension.lower()
            if (lower if os.name == "nt" else extension) in read:
                images.append(start + name)
            elif lower in read or lower in _NOT_READ:
                ignored.append(name)
            elif entry.is_dir():
                folders.append(name)
    images.sort()
    return Folder(path, images, frozenset(names), sorted(ignored), sorted(folders))


# Which images `skip_image_resolution` leaves out.
#
# Source: sd-scripts since 0.10.2, `DreamBoothDataset.__init__` and `FineTuningDataset.__init__`. The product of the
# sides counts, not their shape, and an image of just as many pixels is left out. It happens before images are held
# back for validation and before regularization images are counted, which are left out alike.


class Skips(NamedTuple):
    """Which of N images are left out.

    Attributes:
        reasons: why, by position.
        unreadable: those among them that have no pixels because they cannot be read.
    """

    reasons: dict[int, str]
    unreadable: tuple[int, ...]


def skipped_images(
    paths: Sequence[str], noted: Sequence[Size | None], limit: Size | None, metadata_cache: str = "auto"
) -> Skips:
    """Which images are left out.

    Args:
        noted: [N] sizes that sd-scripts goes by without looking at the file, or None; those are read.
        limit: `skip_image_resolution`; None leaves out nothing.
    """
    if limit is None or not len(paths):
        return Skips({}, ())
    sizes = np.array([size or (0, 0) for size in noted], dtype=np.int64)
    unknown = [i for i, size in enumerate(noted) if size is None]
    failed: dict[int, str] = {}
    if unknown:
        scan = scan_sizes([paths[i] for i in unknown], metadata_cache)
        sizes[unknown] = scan.sizes
        failed = {unknown[i]: reason for i, _, reason in scan.failures}
    small = np.flatnonzero(sizes.prod(axis=1) <= limit[0] * limit[1]).tolist()
    bound = f"no more pixels than skip_image_resolution {limit[0]}x{limit[1]}"
    reasons = {i: failed.get(i) or f"{sizes[i, 0]}x{sizes[i, 1]}: {bound}" for i in small}
    return Skips(reasons, tuple(i for i in small if i in failed))


CACHE_FILE = "metadata_cache.json"


def written_ns(file: str) -> int:
    """When a file was written, ns; 0 where there is none."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


def are_stated_truly(images: Sequence[str], written: Sequence[int]) -> list[bool]:
    """[N] whether the size of each image, noted at a time (ns), is to be believed.

    Not for WebP files, which imagesize 1.x reads one pixel short, nor for images that were edited since: they would be
    squeezed into the old shape. Of an image that is gone there is nothing better.
    """
    job = Job(STAT, images)
    job.run()
    times = job.rows["mtime_ns"].tolist()  # 0 of an image that is gone
    return [
        time <= noted and not image.lower().endswith(".webp")
        for image, time, noted in zip(images, times, written, strict=True)
    ]


CONTROL_IN_THE_MIDDLE = (
    "[kohya_bucket] focus is set, but this version of sd-scripts cuts control images in the middle, whatever is cut "
    "from their images: leave focus out, or train with sd-scripts 0.11"
)


@dataclass(frozen=True)
class DatasetTable:
    """The images of one dataset as columns, in the order in which sd-scripts holds them.

    A config gives it, or sd-scripts' own object; training, plans, `doctor` and `precompute` place images from it.

    Attributes:
        keys: [N] the keys under which sd-scripts keeps them: the paths, or the keys of the metadata.
        paths: [N] the files.
        stated_sizes: [N, 2] int32 (width, height) from metadata that sd-scripts trusts; 0 where none is stated,
            or for images in a `metadata_cache.json` whose sizes may be wrong there (WebP, edited since).
        repeats: [N] int64, how often an epoch trains each image.
        is_reg: [N] bool, regularization images.
        subset: [N] int32, number of the subset, from 1.
        captions: [N] what is trained with each; None where there is none; empty where captions were not read.
        conditioning: [N] the control images of a ControlNet dataset, "" where there is none; empty otherwise.
        skipped: (key, reason) of the images that `skip_image_resolution` leaves out; they are in no other column.
    """

    keys: tuple[str, ...]
    paths: tuple[str, ...]
    stated_sizes: IntArray
    repeats: npt.NDArray[np.int64]
    is_reg: npt.NDArray[np.bool_]
    subset: IntArray
    captions: tuple[str | None, ...] = ()
    conditioning: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, rows: Sequence[int]) -> DatasetTable:
        columns: dict[str, Any] = {
            name: getattr(self, name)[rows] for name in ("stated_sizes", "repeats", "is_reg", "subset")
        }
        for name in ("keys", "paths", "captions", "conditioning"):
            column = getattr(self, name)
            columns[name] = tuple(column[i] for i in rows) if column else ()
        return replace(self, **columns)

    def sizes(self, metadata_cache: str = "auto", progress: Progress | None = None) -> SizeScan:
        """As metadata states them, or else from headers, which are kept for other commands."""
        stated, unknown = SizeScan.stated(self.paths, self.stated_sizes), self.stated_sizes.min(axis=1, initial=1) <= 0
        if not unknown.any():
            return stated
        paths = [path for path, read in zip(self.paths, unknown.tolist(), strict=True) if read]
        return stated.with_rows(np.flatnonzero(unknown), scan_sizes(paths, metadata_cache, progress))

    def place(self, scan: SizeScan, batch_size: int, keys: DatasetKeys, options: AdapterOptions) -> PlacedDataset:
        """The images in their buckets; see `place_images`, also for what is raised."""
        return place_images(
            self.keys, scan.sizes, self.repeats, batch_size, keys, options,
            paths=self.paths, unreadable=scan.unreadable,
        )  # fmt: skip


def refuse_random_crops(subsets: Sequence[Any], options: AdapterOptions) -> None:
    """Raise `ConfigError` where a focus is set for images whose crops sd-scripts would draw at random."""
    if options.focus and any(getattr(subset, "random_crop", False) for subset in subsets):
        raise ConfigError(
            "[kohya_bucket] focus is set, but random_crop is on, which draws the crops that a focus decides: leave "
            "out one of them"
        )
