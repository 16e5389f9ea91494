"""What `precompute` is to encode: the images of paths with a rule, or those of a dataset config."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kohya_bucket.adapter.store_folder import store_folder
from kohya_bucket.cli.configs import adapter_options
from kohya_bucket.cli.console import say
from kohya_bucket.cli.gpus import gpu_counts
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.cli.rule_options import RuleOptions
from kohya_bucket.cli.sizes import images_in
from kohya_bucket.errors import ConfigError
from kohya_bucket.images import read_sizes
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.latents.store.layout import Layout, common_root
from kohya_bucket.sdscripts.config import Config, Severity, read_config
from kohya_bucket.sdscripts.plan.latents import wanted_by_config
from kohya_bucket.texts import read_text, some

__all__ = ["Part", "by_config", "by_path", "captions_of"]


@dataclass
class Part:
    """Items that are encoded in one go, and the folder that their names start from."""

    wanted: LatentItems
    root: Path


def by_path(
    sources: list[str], options: RuleOptions, encoding: EncodeOptions, output: Path | None, *, content_hash: bool,
    recursive: bool, captions_file: Path | None, quiet: bool,
) -> list[Part]:  # fmt: skip
    """All images that `sources` name, in the buckets that the options say."""
    if not sources:
        raise ConfigError("nothing to encode: name a folder, e.g. kohya-bucket precompute data/ --vae …")
    rule = None if options.from_images else options.make()  # mistakes are named before a million headers are read
    paths = images_in(sources, recursive=recursive)
    captions = captions_of(paths, captions_file)
    with scan_progress("reading headers", quiet=quiet) as progress:
        scan = read_sizes(paths, progress=progress)
    placement = (rule or options.make(scan.sizes)).place(scan.sizes)
    root = _root(paths, sources, output)
    wanted = LatentItems.from_placement(
        paths, scan.sizes, placement, encoding, root, captions=captions, content_hash=content_hash
    )
    reasons = {path: reason for _, path, reason in scan.failures}
    wanted.without_bucket = [(path, reasons.get(path, reason)) for path, reason in wanted.without_bucket]
    return [Part(wanted, root)]


def usable_config(config: Path, train_batch_size: int | None) -> Config:
    """A config of which everything can be cached.

    Raises:
        ConfigError: it has a mistake at which sd-scripts stops.
    """
    read = read_config(config, {} if train_batch_size is None else {"train_batch_size": train_batch_size})
    errors = read.findings.of(Severity.ERROR)
    if errors:
        raise ConfigError(f"{config}: {errors[0]}; `kohya-bucket plan {config}` lists everything")
    return read


def store_of_config(read: Config) -> Path | None:
    """Where training with this config looks for shards; None where it looks for npz.

    Raises:
        ConfigError: in several folders, one for each data set.
    """
    adapter = adapter_options(read)
    if adapter.latent_cache != "shards":
        return None
    folders = sorted({store_folder(adapter, one.images.paths[0]) for one in read.datasets if len(one.images)})
    if len(folders) > 1:
        raise ConfigError(
            f"latents of the config's data sets lie in {len(folders)} folders ({some(list(map(str, folders)))}): set "
            "latent_cache_dir in [kohya_bucket], and give it as --output"
        )
    return folders[0] if folders else None


def by_config(
    read: Config,
    encoding: EncodeOptions,
    output: Path | None,
    *,
    content_hash: bool,
    gpus: str,
    quiet: bool,
) -> list[Part]:
    """All that sd-scripts would cache for a dataset config, one part for each kind of caching."""
    adapter = adapter_options(read)
    # Every process must come to the same list, whatever devices it sees.
    counts = gpu_counts(gpus or os.environ.get("WORLD_SIZE", "1"))
    if adapter.moves_images and not quiet:
        batches = " and ".join(str(n) for n in sorted({dataset.config.batch_size for dataset in read.datasets}))
        numbers = ", ".join(map(str, counts))
        where = f"on {numbers} GPU{'s' * (counts != [1])} " if adapter.same_shape else ""
        more = "" if gpus or not adapter.same_shape else "; for another number add --gpus"
        say(f"remainder {adapter.remainder!r} moves images: for training {where}in batches of {batches}{more}")
    paths = [path for dataset in read.datasets for path in dataset.images.paths]
    root = _root(paths, [], output)
    with scan_progress("reading headers", quiet=quiet) as progress:
        found = wanted_by_config(
            read, encoding, root, options=adapter, gpus=counts, content_hash=content_hash, progress=progress
        )
    return [Part(wanted, root) for wanted in found]


def captions_of(paths: list[str], file: Path | None) -> list[str | None]:
    """One per image: the lines of a file, or what stands in the .txt beside each; None where there is none."""
    if file is not None:
        lines: list[str | None] = [*_utf8(file).splitlines()]
        if len(lines) != len(paths):
            raise ConfigError(f"{file} has {len(lines)} lines for {len(paths)} images: give one per image, in order")
        return lines
    out: list[str | None] = []
    for path in paths:
        beside = Path(path).with_suffix(".txt")
        out.append(_utf8(beside).strip() if beside.is_file() else None)
    return out


def _utf8(file: Path) -> str:
    try:
        return read_text(file, None)
    except ConfigError as error:
        raise ConfigError(f"{file}: the caption cannot be read ({error}); it must be UTF-8 text") from None


def _root(paths: list[str], sources: list[str], output: Path | None) -> Path:
    """Folder that the sources' names start from: the store's own, the one folder given, or the common one."""
    if len(sources) == 1 and Path(sources[0]).is_dir() and (output is None or not Layout(output).store_file.is_file()):
        return Path(sources[0]).absolute()  # with its links, as the images' paths have them
    return common_root(paths, output)
