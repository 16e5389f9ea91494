"""From what a command line names to data sets with their rules: folders with options, or a dataset config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import toml

from kohya_bucket.adapter.dataset_keys import at_resolutions, rule_for
from kohya_bucket.adapter.options import AdapterOptions, environment_table
from kohya_bucket.buckets.by_name import rule_from_name
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.cli.sizes import parse_resolution
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.images import MetadataCache, list_images
from kohya_bucket.images.decoding import undecodable
from kohya_bucket.images.pool import Engine
from kohya_bucket.reports.images import ImageTable, Subject
from kohya_bucket.sdscripts.config import Finding, ReadDataset, Severity, read_config

__all__ = ["Reading", "RuleOptions", "from_config", "from_folders", "is_bucket_set"]


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

    def table(self, paths: Sequence[str]) -> ImageTable:
        """The headers of `paths`, from the cache where it knows them."""
        before = MetadataCache.load(self.cache) if self.cache is not None and self.cache.exists() else None
        with scan_progress("reading headers", quiet=self.quiet) as progress:
            read = MetadataCache.build if before is None else before.refresh
            known = read(paths, hash=self.hash, workers=self.workers, engine=self.engine, progress=progress)
        if self.cache is not None:
            known.save(self.cache)
        hashes = None
        if self.hash and known.hashes is not None:
            hashes = [content.decode("ascii") for content in known.hashes.tolist()]
        return ImageTable.from_scan(known.scan(), hashes=hashes)

    def undecodable(self, images: ImageTable) -> dict[str, str]:
        """{path: reason} of readable images whose pixels are not, where they are to be decoded."""
        if not self.decode:
            return {}
        with scan_progress("decoding", quiet=self.quiet) as progress:
            return dict(undecodable([images.paths[i] for i in np.flatnonzero(images.readable).tolist()], progress))


@dataclass(frozen=True)
class RuleOptions:
    """Options that make a rule, as `rule_from_name` takes them; `None` stands for its own default."""

    name: str
    resolution: str
    min_size: int
    max_size: int | None
    steps: int
    no_upscale: bool
    switching: str | None
    no_upscale_fit: str
    max_crop: float | None
    num_buckets: int

    def rule(self, sizes: Any) -> Any:
        """The rule; `sizes` [N, 2] are for rules that are made from the data."""
        width, height = parse_resolution(self.resolution)
        if self.steps < 1:
            raise ConfigError(f"--bucket-reso-steps is {self.steps}, but must be 1 or more; 64 is usual")
        high = self.max_size or -(-2 * max(width, height) // self.steps) * self.steps
        return rule_from_name(
            self.name, max_reso=(width, height), min_size=self.min_size, max_size=high, reso_steps=self.steps,
            no_upscale=self.no_upscale, sizes=sizes, switching=self.switching, no_upscale_fit=self.no_upscale_fit,
            max_crop=self.max_crop, num_buckets=self.num_buckets,
        )  # fmt: skip


def from_folders(sources: list[str], options: RuleOptions, batch_size: int, reading: Reading) -> list[Subject]:
    """One data set of all images that `sources` name."""
    if not sources:
        raise ConfigError("nothing to analyse: name a folder, e.g. kohya-bucket analyze data/, or give --config")
    paths = list_images(sources, recursive=reading.recursive)
    if not paths:
        raise KohyaBucketError(f"{', '.join(sources)}: no images found there")
    images = reading.table(paths)
    images = images.without(reading.undecodable(images))
    name = ", ".join(Path(source).name or Path(source).resolve().name for source in sources)
    origin = "" if options.name == "kohya" else options.name.replace(":", " ", 1)
    rule = options.rule(images.sizes)
    return [Subject(name, images, rule, batch_size, origin, limit_follows=options.max_size is None)]


def from_config(path: Path, batch_size: int | None, reading: Reading) -> tuple[list[Subject], list[Finding]]:
    """Every data set of an sd-scripts dataset config, and what is wrong with the config.

    Raises:
        ConfigError: the config cannot be read, or none of its data sets has an image.
    """
    config = read_config(path)
    usable = [d for d in config.datasets if len(d.images) and d.config.resolution is not None]
    findings = [f for f in config.findings if f.severity is not Severity.NOTE]
    if not usable:
        reasons = "; ".join(f.text for f in findings[:3])
        raise ConfigError(f"{path}: no data set with images and a resolution in it: {reasons or 'see its folders'}")
    paths = list(dict.fromkeys(path for d in usable for path in d.images.paths))
    everything = reading.table(paths)
    broken = reading.undecodable(everything)
    row_of = {name: i for i, name in enumerate(paths)}
    settings = AdapterOptions.from_tables(*environment_table(), (str(path), config.table or {}))
    subjects = []
    for dataset in usable:
        rows = np.array([row_of[name] for name in dataset.images.paths], dtype=np.intp)
        name = f"{path.stem}, dataset {dataset.config.number}" if len(usable) > 1 else path.stem
        images = _with_config(everything.take(rows), dataset).without(broken)
        for one in at_resolutions(dataset.config.dataset_keys, settings):
            at = f"{name}, {one.resolution[0]}x{one.resolution[1]}" if settings.resolutions else name
            rule = rule_for(one, settings, images.sizes)
            subjects.append(Subject(at, images, rule, batch_size or dataset.config.batch_size, str(path)))
    return subjects, findings


def _with_config(images: ImageTable, dataset: ReadDataset) -> ImageTable:
    stated = dataset.images.stated_sizes
    known = stated.min(axis=1, initial=1) > 0
    endings = tuple(dict.fromkeys(s.caption_extension for s in dataset.config.subsets if s.caption_extension))
    return replace(
        images,
        # sd-scripts trusts the sizes that metadata states.
        sizes=np.where(known[:, None], stated, images.sizes).astype(np.int32),
        failures={i: why for i, why in images.failures.items() if not known[i]},
        repeats=dataset.images.repeats,
        captions=endings or images.captions,
    )


def is_bucket_set(path: Path) -> bool:
    """Whether a TOML or JSON file holds a bucket set rather than a dataset config."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = json.loads(text) if path.suffix.lower() == ".json" else toml.loads(text)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "buckets" in data and "datasets" not in data
