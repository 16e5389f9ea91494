"""What `precompute` is to encode: the images of paths with a rule, or those of a dataset config."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kohya_bucket.adapter.store_folder import store_folder
from kohya_bucket.cli.configs import adapter_options
from kohya_bucket.cli.console import say
from kohya_bucket.cli.gpus import gpu_counts
from kohya_bucket.cli.image_sources import ImageSource, source_in
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.cli.rule_options import RuleOptions
from kohya_bucket.cli.source_options import SourceOptions
from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.latents.remote.remote_path import Place
from kohya_bucket.latents.store.layout import Layout, common_root
from kohya_bucket.sdscripts.config import Config, Severity, read_config
from kohya_bucket.sdscripts.wanted_latents import wanted_by_config
from kohya_bucket.texts import some

if TYPE_CHECKING:
    from kohya_bucket.adapter.options import AdapterOptions
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.images.parallel import Engine

__all__ = ["Chosen", "Part", "Planned", "chosen", "parts_of", "planned", "store_of"]


@dataclass
class Part:
    """Items that are encoded in one go, and the folder that their names start from."""

    wanted: LatentItems
    root: Path


@dataclass(frozen=True)
class Chosen:
    """Images that a command line names; the rule is None where it is made from all sizes."""

    sources: list[str]
    images: ImageSource
    options: RuleOptions
    rule: BucketRule | None


def chosen(sources: list[str], options: RuleOptions, captions: SourceOptions, *, recursive: bool) -> Chosen:
    """The images that `sources` name. No header is read yet, so mistakes are named at once.

    Raises:
        KohyaBucketError: no image is there, the options make no rule, or the captions cannot be read.
    """
    if not sources:
        raise ConfigError("nothing to encode: name a folder, e.g. kohya-bucket precompute data/ --vae …")
    rule = None if options.from_images else options.make()
    return Chosen(sources, source_in(sources, captions, recursive=recursive), options, rule)


def _by_path(
    chosen: Chosen, encoding: EncodeOptions, output: Path | None, *, content_hash: bool, quiet: bool, engine: Engine
) -> list[Part]:
    """All of these images, in the buckets that the options say."""
    found = chosen.images.read(engine, quiet=quiet)
    if not len(found.images):
        raise ConfigError(f"{', '.join(chosen.sources)}: no images found there")
    placement = (chosen.rule or chosen.options.make(found.sizes)).place(found.sizes)
    root = _root(found.images.files, chosen.sources, output)
    wanted = LatentItems.from_placement(
        found.images, found.sizes, placement, encoding, root, captions=found.captions, content_hash=content_hash
    )
    left_out = zip(np.flatnonzero(~placement.placed).tolist(), wanted.without_bucket, strict=True)
    wanted.without_bucket = [(name, found.reasons.get(i, reason)) for i, (name, reason) in left_out]
    return [Part(wanted, root)]


@dataclass(frozen=True)
class Planned:
    """A dataset config, its `[kohya_bucket]` table, and the numbers of GPUs that will train it."""

    read: Config
    adapter: AdapterOptions
    gpus: list[int]
    gpus_said: bool


def planned(config: Path, train_batch_size: int | None, gpus: str) -> Planned:
    """A config of which everything can be cached; `gpus` is "" for the number that this run has.

    Raises:
        KohyaBucketError: it has a mistake at which sd-scripts stops, or an option has an unknown value.
    """
    read = read_config(config, {} if train_batch_size is None else {"train_batch_size": train_batch_size})
    errors = read.findings.of(Severity.ERROR)
    if errors:
        raise ConfigError(f"{config}: {errors[0]}; `kohya-bucket plan {config}` lists everything")
    # Every process must come to the same list, whatever devices it sees.
    return Planned(read, adapter_options(read), gpu_counts(gpus or os.environ.get("WORLD_SIZE", "1")), bool(gpus))


def store_of(config: Planned) -> Place | None:
    """Where training with this config looks for shards; None where it looks for npz.

    Raises:
        ConfigError: in several folders, one for each data set.
    """
    adapter, read = config.adapter, config.read
    if adapter.latent_cache != "shards":
        return None
    folders = sorted({store_folder(adapter, one.images.paths[0]) for one in read.datasets if len(one.images)}, key=str)
    if len(folders) > 1:
        raise ConfigError(
            f"latents of the config's data sets lie in {len(folders)} folders ({some(list(map(str, folders)))}): set "
            "latent_cache_dir in [kohya_bucket], and give it as --output"
        )
    return folders[0] if folders else None


def _by_config(
    config: Planned, encoding: EncodeOptions, output: Path | None, *, content_hash: bool, quiet: bool
) -> list[Part]:
    """All that sd-scripts would cache for a dataset config, one part for each kind of caching."""
    read, adapter, counts = config.read, config.adapter, config.gpus
    if adapter.moves_images and not quiet:
        batches = " and ".join(str(n) for n in sorted({dataset.config.batch_size for dataset in read.datasets}))
        numbers = ", ".join(map(str, counts))
        where = f"on {numbers} GPU{'s' * (counts != [1])} " if adapter.same_shape else ""
        more = "" if config.gpus_said or not adapter.same_shape else "; for another number add --gpus"
        say(f"remainder {adapter.remainder!r} moves images: for training {where}in batches of {batches}{more}")
    paths = [path for dataset in read.datasets for path in dataset.images.paths]
    root = _root(paths, [], output)
    with scan_progress("reading headers", quiet=quiet) as progress:
        found = wanted_by_config(
            read, encoding, root, options=adapter, gpus=counts, content_hash=content_hash, progress=progress
        )
    return [Part(wanted, root) for wanted in found]


def parts_of(
    source: Chosen | Planned, encoding: EncodeOptions, output: Path | None, *, content_hash: bool, quiet: bool,
    engine: Engine = "auto",
) -> list[Part]:  # fmt: skip
    """What is to be encoded, in the order in which it is; reads the headers of the images (of a config's, here)."""
    if isinstance(source, Planned):
        return _by_config(source, encoding, output, content_hash=content_hash, quiet=quiet)
    return _by_path(source, encoding, output, content_hash=content_hash, quiet=quiet, engine=engine)


def _root(paths: list[str], sources: list[str], output: Path | None) -> Path:
    """Folder that the sources' names start from: the store's own, the one folder given, or the common one."""
    if len(sources) == 1 and Path(sources[0]).is_dir() and (output is None or not Layout(output).store_file.is_file()):
        return Path(sources[0]).absolute()  # with its links, as the images' paths have them
    return common_root(paths, output)
