"""`kohya-bucket precompute`: encode a dataset once, on every GPU there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from kohya_bucket.buckets.rules.registry import named_rule
from kohya_bucket.cli.configs import given_config
from kohya_bucket.cli.help import PlainCommand, opt
from kohya_bucket.cli.options import (
    ClusterOptions,
    Quiet,
    Recursive,
    RuleArguments,
    SourceOptions,
    StoreOptions,
    TextOptions,
    VaeOptions,
    given,
    refuse_beside,
)
from kohya_bucket.cli.options import path as folder
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.cli.encoding import ConfigImages, NamedImages


class PrecomputeCommand(PlainCommand):
    """What follows a trainer's name are the trainer's arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        trainer = next((k for k, arg in enumerate(args) if arg.endswith(".py")), 0)
        if "--text" in args[:trainer]:
            args = [*args[:trainer], "--", *args[trainer:]]
        return super().parse_args(ctx, args)


KIND = PrecomputeCommand
_USAGE = "usage: accelerate launch -m kohya_bucket.precompute --text TRAINER.py [the trainer's arguments]"
_ARCH_OF_PRESET = {"preset:sdxl": "sdxl", "preset:sd15": "sd", "preset:novelai": "sd"}


_OUTPUT_HELP = "Folder or address of the store, else that of --config; npz go beside the images without."


def precompute(
    context: typer.Context,
    path: Annotated[
        list[str] | None, typer.Argument(help="Folders, files, lists, tar shards, Parquet files, saved datasets.")
    ] = None,
    *,
    vae: VaeOptions,
    output: Path | None = opt(None, _OUTPUT_HELP, "--output", "-o", parser=folder),
    config: Path | None = opt(None),
    gpus: str | None = opt(None, usual=False),
    train_batch_size: int | None = opt(None, usual=False, min=1),
    options: RuleArguments,
    encode_batch_size: int | None = opt(None, "Images per run of the VAE; 8, or what fits.", min=1),
    stored: StoreOptions,
    beside: SourceOptions,
    captions: TextOptions,
    hash: bool = opt(False, "", "--hash", usual=False),
    workers: int | None = opt(None, usual=False, min=1),
    cluster: ClusterOptions,
    recursive: Recursive = True,
    quiet: Quiet = False,
) -> None:
    """On several GPUs, each encodes its share: torchrun --nproc-per-node 8 -m kohya_bucket.precompute …, or
    accelerate launch -m. On several machines: --engine ray.
    """
    if captions.text and path and path[0].endswith(".py"):
        _run_until_encoded(context, path)
    elif captions.text:
        from kohya_bucket.cli.encoding import encode_captions

        encode_captions(context, captions, output, vae, encode_batch_size, stored.collection, quiet)
        return
    from kohya_bucket.trainers.door.face import Asked
    from kohya_bucket.trainers.door.registry import usual_trainer

    reader, on_ray = _how(context, captions, stored, cluster)
    config, options, path = given_config(config, options, path or [])
    named = usual_trainer().programs(Asked(arch=vae.arch)).family if vae.arch else ""
    vae = replace(vae, arch=named or _ARCH_OF_PRESET.get(options.name, ""))
    if config is None:
        options = options.for_arch(context, vae.arch)
    # All that is given is checked before a model is downloaded and loaded.
    if not vae.vae:
        raise ConfigError("no VAE to encode with: add --vae, e.g. --vae stabilityai/sdxl-vae")
    from kohya_bucket.cli.encoding import EncodeJob, planned

    source: NamedImages | ConfigImages
    if config is not None:
        what = f"--config {config} says which images and buckets there are"
        refuse_beside(context, what, (*options.fields, *vars(beside)), path)
        source = planned(config, train_batch_size, gpus, reader)
        if output is None and stored.format == "shards":
            output = cast("Path | None", source.store())
    else:
        source = _chosen(context, path, options, beside, stored.format, recursive=recursive)
    work = EncodeJob(source, stored.recipe(vae.dtype, output), output, hash, quiet, encode_batch_size, workers)
    failed = work.on_ray(vae, cluster) if on_ray else work.here(vae, stored.format, reader)
    if failed:
        raise KohyaBucketError(f"{counted(failed, 'image')} could not be encoded, see above; all others are done")


def _how(
    context: typer.Context, captions: TextOptions, stored: StoreOptions, cluster: ClusterOptions
) -> tuple[str, bool]:
    """Which version of the trainer will read npz, and whether Ray encodes; refuses what excludes each other."""
    if options_of_texts := given(context, (name for name in vars(captions) if name != "text")):
        raise ConfigError(f"{' and '.join(options_of_texts)} are about captions: add --text, or leave them out")
    if stored.for_ and stored.format != "npz":
        raise ConfigError("--for says which sd-scripts will read npz: add --format npz, or leave it out")
    from kohya_bucket.trainers.door.registry import usual_trainer

    reader = usual_trainer().cache_files().version(stored.for_) if stored.format == "npz" else ""
    on_ray = cluster.on_ray()
    if on_ray and stored.format != "shards":
        raise ConfigError("--engine ray writes shards: leave out --format npz, and export the store as npz afterwards")
    return reader, on_ray


def _chosen(
    context: typer.Context, path: list[str], options: RuleArguments, beside: SourceOptions, format: str, *,
    recursive: bool,
) -> NamedImages:  # fmt: skip
    """The images and buckets that the command line names.

    Encoding takes long, and other sizes than were meant would only show afterwards.
    """
    from kohya_bucket.cli.encoding import NamedImages
    from kohya_bucket.cli.sources import source_in

    if given(context, ("gpus", "train_batch_size")):
        raise ConfigError("--gpus and --train-batch-size say how a --config will be trained: leave them out")
    if not given(context, ("arch", "rule", "preset", "bucket_config", "resolution")):
        raise ConfigError("choose the buckets by --arch, --resolution, --rule, --preset, --bucket-config or --config")
    if options.brings_sizes:
        sizes = ("resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")
        refuse_beside(context, f"{options.name.replace(':', ' ', 1)} brings its own sizes", sizes)
    if not path:
        raise ConfigError("nothing to encode: name a folder, e.g. kohya-bucket precompute data/ --vae …")
    options.check()
    images, rule = (
        source_in(path, beside, recursive=recursive),
        None if named_rule(options.name).from_images else options.make(),
    )
    if format == "npz" and images.one:
        raise ConfigError(f"{images.one}: npz files lie beside image files, and it holds many: use --format shards")
    holds = f"{images.one} holds images and captions" if images.one else "each image has a file of its own"
    refuse_beside(context, holds, images.unfit)
    if beside.captions_file is not None:
        what = f"--captions-file {beside.captions_file} has the captions"
        refuse_beside(context, what, ("caption_extension", "caption_column"))
    return NamedImages(path, images, options, rule)


def _run_until_encoded(context: typer.Context, arguments: list[str]) -> NoReturn:
    from kohya_bucket.launch import run_trainer
    from kohya_bucket.trainers.door.registry import usual_trainer

    others = [name for name in context.params if name not in ("path", "text", "quiet")]
    refuse_beside(context, f"{arguments[0]} encodes captions with its own arguments, which follow its name", others)
    usual_trainer().cache_files().end_with_captions()
    run_trainer(arguments[0], arguments[1:], _USAGE)
    raise ConfigError(f"{arguments[0]} ended before it made a loader of sd-scripts' datasets: nothing was encoded")
