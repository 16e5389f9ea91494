"""`kohya-bucket precompute`: encode a data set once, on every GPU there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kohya_bucket.cli.cluster_options import ClusterOptions
from kohya_bucket.cli.common_options import Recursive
from kohya_bucket.cli.common_options import path as folder
from kohya_bucket.cli.configs import given_config
from kohya_bucket.cli.encoders import VaeOptions
from kohya_bucket.cli.given import given, refuse_beside
from kohya_bucket.cli.option_groups import with_option_groups
from kohya_bucket.cli.precompute_text import PrecomputeCommand, TextOptions, encode_captions, run_until_encoded
from kohya_bucket.cli.rule_options import RuleOptions
from kohya_bucket.cli.source_options import SourceOptions
from kohya_bucket.cli.stored_latents import StoreOptions
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.cli.image_sources import ImageSource
    from kohya_bucket.cli.precompute_items import Chosen, Planned

_ARCH_OF_PRESET = {"preset:sdxl": "sdxl", "preset:sd15": "sd", "preset:novelai": "sd"}


def register(app: typer.Typer) -> None:
    app.command(cls=PrecomputeCommand)(with_option_groups(precompute))


def precompute(
    context: typer.Context,
    path: Annotated[
        list[str] | None, typer.Argument(help="Folders, files, lists, tar shards, Parquet files, saved data sets.")
    ] = None,
    *,
    vae: VaeOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=folder,
            help="Folder or address of the store, else that of --config; npz go beside the images without.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="An sd-scripts dataset config instead of PATH.")] = None,
    gpus: Annotated[
        str,
        typer.Option(help="With --config: numbers of GPUs that you train on, e.g. 1,2. Default: the number used here."),
    ] = "",
    train_batch_size: Annotated[int | None, typer.Option(min=1, help="With --config, if it does not set one.")] = None,
    options: RuleOptions,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images per run of the VAE.")] = 8,
    stored: StoreOptions,
    beside: SourceOptions,
    captions: TextOptions,
    hash: Annotated[bool, typer.Option("--hash", help="Store a hash of each image's content.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads that decode images; with ray, batches.")] = None,
    cluster: ClusterOptions,
    recursive: Recursive = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but problems.")] = False,
) -> None:
    """On several GPUs: torchrun --nproc-per-node 8 -m kohya_bucket.precompute …, or accelerate launch -m.

    Each process encodes its share. Start again to encode what is missing. For several machines: --engine ray.
    """
    if captions.text and path and path[0].endswith(".py"):
        run_until_encoded(context, path)
    elif captions.text:
        encode_captions(
            context, captions, output, dtype=vae.dtype, device=vae.device, batch_size=batch_size,
            collection=stored.collection, quiet=quiet, cluster=cluster,
        )  # fmt: skip
        return
    if options_of_texts := given(context, (name for name in vars(captions) if name != "text")):
        raise ConfigError(f"{' and '.join(options_of_texts)} are about captions: add --text, or leave them out")
    from kohya_bucket.cli.precompute_items import chosen, planned, store_of
    from kohya_bucket.cli.precompute_work import Work

    reader, on_ray = stored.reader(), cluster.on_ray()
    if on_ray and stored.format != "shards":
        raise ConfigError("--engine ray writes shards: leave out --format npz, and export the store as npz afterwards")
    config, options, path = given_config(config, options, path or [])
    if not vae.arch:
        vae = replace(vae, arch=_ARCH_OF_PRESET.get(options.name, ""))
    # All that is given is checked before a model is downloaded and loaded.
    source: Chosen | Planned
    vae.check()
    if config is not None:
        _check_config(context, config, path, options)
        source = planned(config, train_batch_size, gpus)
        if output is None and stored.format == "shards":
            output = cast("Path | None", store_of(source))
    else:
        _check_rule(context, options)
        source = chosen(path, options, beside, recursive=recursive)
        _check_source(context, source.images, beside, stored.format)
    recipe = stored.recipe(vae.dtype, output)
    work = Work(source, recipe, output, hash, quiet, batch_size, workers)
    failed = work.on_ray(vae, cluster) if on_ray else work.here(vae, stored.format, reader)
    if failed:
        raise KohyaBucketError(f"{counted(failed, 'image')} could not be encoded, see above; all others are done")


def _check_config(context: typer.Context, config: Path, path: list[str], options: RuleOptions) -> None:
    what = f"--config {config} says which images and buckets there are"
    if path:
        raise ConfigError(f"{what}: leave out {' '.join(path)}")
    refuse_beside(context, what, (*options.fields, *vars(SourceOptions())))


def _check_source(context: typer.Context, images: ImageSource, beside: SourceOptions, format: str) -> None:
    if format == "npz" and images.one:
        raise ConfigError(f"{images.one}: npz files lie beside image files, and it holds many: use --format shards")
    holds = f"{images.one} holds images and captions" if images.one else "each image has a file of its own"
    refuse_beside(context, holds, images.unfit)
    if beside.captions_file is not None:
        what = f"--captions-file {beside.captions_file} has the captions"
        refuse_beside(context, what, ("caption_extension", "caption_column"))


def _check_rule(context: typer.Context, options: RuleOptions) -> None:
    """Encoding takes long: nobody shall find out afterwards that it was at other sizes than was meant."""
    if given(context, ("gpus", "train_batch_size")):
        raise ConfigError("--gpus and --train-batch-size say how a --config will be trained: leave them out")
    if not given(context, ("rule", "preset", "bucket_config", "resolution")):
        raise ConfigError("choose the buckets by --resolution, --rule, --preset, --bucket-config or --config")
    if options.brings_sizes:
        sizes = ("resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")
        refuse_beside(context, f"{options.name.replace(':', ' ', 1)} brings its own sizes", sizes)
