"""What a config says once everything is inherited: `SubsetConfig`, `DatasetConfig`, and the images: `ImageList`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.dataset_keys import DatasetKeys
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.sdscripts.config.keys import NEWEST, Kind, Release
from kohya_bucket.texts import some

__all__ = ["DatasetConfig", "Entry", "ImageList", "Reading", "Registry", "SubsetConfig", "usable_subsets"]


@dataclass(frozen=True)
class SubsetConfig:
    """One subset, with every value that sd-scripts would use. `place` names it in messages."""

    number: int
    place: str
    kind: Kind
    image_dir: str | None = None
    metadata_file: str | None = None
    conditioning_data_dir: str | None = None
    num_repeats: int = 1
    is_reg: bool = False
    class_tokens: str | None = None
    caption_extension: str = ".caption"
    cache_info: bool = False
    alpha_mask: bool = False
    shuffle_caption: bool = False
    caption_separator: str = ","
    keep_tokens: int = 0
    keep_tokens_separator: str = ""
    secondary_separator: str | None = None
    enable_wildcard: bool = False
    color_aug: bool = False
    flip_aug: bool = False
    face_crop_aug_range: tuple[float, float] | None = None
    random_crop: bool = False
    caption_prefix: str | None = None
    caption_suffix: str | None = None
    caption_dropout_rate: float = 0.0
    caption_dropout_every_n_epochs: int = 0
    caption_tag_dropout_rate: float = 0.0
    token_warmup_min: int = 1
    token_warmup_step: float = 0
    custom_attributes: Mapping[str, Any] = field(default_factory=dict)
    resize_interpolation: str | None = None

    @property
    def identity(self) -> tuple[str | None, ...]:
        """What sd-scripts compares to find a subset that was given twice."""
        if self.kind is Kind.FINE_TUNING:
            return (self.metadata_file,)
        return (self.image_dir,)


@dataclass(frozen=True)
class DatasetConfig:
    """One dataset, with every value that sd-scripts would use. `resolution` is (width, height), None if missing."""

    number: int
    place: str
    kind: Kind
    subsets: tuple[SubsetConfig, ...]
    resolution: tuple[int, int] | None = None
    batch_size: int = 1
    enable_bucket: bool = False
    min_bucket_reso: int = 256
    max_bucket_reso: int = 1024
    bucket_reso_steps: int = 64
    bucket_no_upscale: bool = False
    validation_split: float = 0.0
    validation_seed: int | None = None
    prior_loss_weight: float = 1.0
    network_multiplier: float = 1.0
    resize_interpolation: str | None = None
    skip_image_resolution: tuple[int, int] | None = None
    train_inpainting: bool = False
    debug_dataset: bool = False

    @property
    def dataset_keys(self) -> DatasetKeys:
        """The part that decides the buckets.

        Raises:
            ValueError: no resolution is given.
        """
        if self.resolution is None:
            raise ValueError(f"{self.place} has no resolution")
        return DatasetKeys(
            resolution=self.resolution,
            enable_bucket=self.enable_bucket,
            min_bucket_reso=self.min_bucket_reso,
            max_bucket_reso=self.max_bucket_reso,
            bucket_reso_steps=self.bucket_reso_steps,
            bucket_no_upscale=self.bucket_no_upscale,
        )


@dataclass(frozen=True)
class ImageList:
    """The images of one dataset, in the order in which sd-scripts holds them.

    Attributes:
        keys: [N] the keys under which sd-scripts keeps them: the paths, or the keys of the metadata.
        paths: [N] the files.
        stated_sizes: [N, 2] int32 (width, height) from metadata that sd-scripts trusts; 0 where none is stated,
            or for images in a `metadata_cache.json` whose sizes may be wrong there (WebP, edited since).
        repeats: [N] int64, how often an epoch trains each image.
        is_reg: [N] bool, regularization images.
        subset: [N] int32, number of the subset, from 1.
        conditioning: [N] the control images of a ControlNet dataset, "" where there is none; empty otherwise.
        predefined: the bucket sizes that the metadata prescribes (sd-scripts 0.9 with prepared metadata).
        skipped: (key, reason) of the images that `skip_image_resolution` leaves out; they are in no other column.
    """

    keys: tuple[str, ...]
    paths: tuple[str, ...]
    stated_sizes: IntArray
    repeats: npt.NDArray[np.int64]
    is_reg: npt.NDArray[np.bool_]
    subset: IntArray
    conditioning: tuple[str, ...] = ()
    predefined: tuple[tuple[int, int], ...] | None = None
    skipped: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.keys)


# What the readers of the three kinds of datasets share.


@dataclass
class Reading:
    """What one run over a config carries along.

    Attributes:
        findings: where to report.
        release: the version of sd-scripts to follow.
        base: the folder of the config file.
        check_captions: open every caption file, as sd-scripts does.
        metadata_cache: the option of that name, for sizes that decide which images there are.
        written_caches: image lists that sd-scripts would write into `metadata_cache.json` files while it reads
            this config, and would read again for later datasets. Nothing is written here.
    """

    findings: Findings
    release: Release = NEWEST
    base: Path | None = None
    check_captions: bool = True
    metadata_cache: str = "auto"
    written_caches: dict[str, list[str]] = field(default_factory=dict)


def usable_subsets(dataset: DatasetConfig, training: bool, findings: Findings) -> Iterator[SubsetConfig]:
    """The subsets that sd-scripts does not pass over: repeats of 1 or more, and each folder or file once.

    A caller that finds a subset empty must `send(False)`: it then does not count as given.
    """
    seen: set[tuple[str | None, ...]] = set()
    for subset in dataset.subsets:
        repeats = subset.num_repeats if training or subset.kind is not Kind.DREAMBOOTH else 1
        name = subset.metadata_file if subset.kind is Kind.FINE_TUNING else subset.image_dir
        if repeats < 1:
            message = f"num_repeats is {repeats}, so sd-scripts skips {name!r}"
            findings.warning("no-repeats", subset.place, message, "set it to 1 or more, or remove the subset")
            continue
        if subset.identity in seen:
            message = f"{name!r} was given before in this dataset; sd-scripts uses the first and skips this one"
            findings.warning("duplicate-subset", subset.place, message, "remove one; use num_repeats to repeat it")
            continue
        if (yield subset) is not False:
            seen.add(subset.identity)


# The growing image list of one dataset: entries under keys, as sd-scripts' `register_image` keeps them.


@dataclass(slots=True)
class Entry:
    """One image; `size` is the size that metadata states, or None."""

    key: str
    path: str
    repeats: int
    subset: int
    size: tuple[int, int] | None = None
    is_reg: bool = False
    conditioning: str = ""


class Registry:
    """Entries in the order of their first registration; a later entry of the same key takes its place.

    `skipped` collects (key, reason) of the images that are left out for their size.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.skipped: list[tuple[str, str]] = []
        self._replaced: dict[tuple[int, int], list[str]] = {}

    def add(self, entry: Entry) -> None:
        """Register an image."""
        before = self.entries.get(entry.key)
        if before is not None:
            self._replaced.setdefault((before.subset, entry.subset), []).append(entry.key)
        self.entries[entry.key] = entry

    def report(self, subsets: tuple[SubsetConfig, ...], findings: Findings) -> None:
        """Name images that two subsets hold under one key."""
        for (first, second), keys in self._replaced.items():
            findings.warning(
                "same-key",
                subsets[second - 1].place,
                f"{len(keys)} image{'s' * (len(keys) != 1)} also in subset {first} under the same name; sd-scripts "
                f"keeps one of each, with the repeats and captions of subset {second} ({some(keys)})",
                "give metadata unique keys (longer or absolute paths), or remove the doubled folder",
                keys,
            )

    def as_list(self, predefined: tuple[tuple[int, int], ...] | None = None) -> ImageList:
        """The entries as columns."""
        entries = list(self.entries.values())
        count = len(entries)
        sizes = np.array([e.size or (0, 0) for e in entries], dtype=np.int32).reshape(count, 2)
        return ImageList(
            keys=tuple(e.key for e in entries),
            paths=tuple(e.path for e in entries),
            stated_sizes=sizes,
            repeats=np.array([e.repeats for e in entries], dtype=np.int64),
            is_reg=np.array([e.is_reg for e in entries], dtype=np.bool_),
            subset=np.array([e.subset for e in entries], dtype=np.int32),
            conditioning=tuple(e.conditioning for e in entries) if any(e.conditioning for e in entries) else (),
            predefined=predefined,
            skipped=tuple(self.skipped),
        )
