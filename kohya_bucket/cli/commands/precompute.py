"""`kohya-bucket precompute`: encode a data set once, on every GPU there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kohya_bucket.cli.common_options import Recursive
from kohya_bucket.cli.common_options import path as folder
from kohya_bucket.cli.configs import given_config
from kohya_bucket.cli.console import plain_console, say
from kohya_bucket.cli.encoders import VaeOptions
from kohya_bucket.cli.given import given, refuse_beside
from kohya_bucket.cli.option_groups import with_option_groups
from kohya_bucket.cli.precompute_text import PrecomputeCommand, TextOptions, encode_captions, run_until_encoded
from kohya_bucket.cli.rule_options import RuleOptions
from kohya_bucket.cli.stored_latents import StoreOptions
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.latents.architectures import ARCHITECTURES
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.cli.precompute_items import Chosen, Part, Planned
    from kohya_bucket.latents.encode.report import PrecomputeReport

_ARCH_OF_PRESET = {"preset:sdxl": "sdxl", "preset:sd15": "sd", "preset:novelai": "sd"}


def register(app: typer.Typer) -> None:
    app.command(cls=PrecomputeCommand)(with_option_groups(precompute))


def precompute(
    context: typer.Context,
    path: Annotated[list[str] | None, typer.Argument(help="Folders, files, patterns, .txt lists.")] = None,
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
    captions_file: Annotated[
        Path | None, typer.Option(help="A file with one caption per line. Default: the .txt file beside each image.")
    ] = None,
    captions: TextOptions,
    hash: Annotated[bool, typer.Option("--hash", help="Store a hash of each image's content.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads that decode images.")] = None,
    recursive: Recursive = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but problems.")] = False,
) -> None:
    """On several GPUs: torchrun --nproc-per-node 8 -m kohya_bucket.precompute …, or accelerate launch -m."""
    if captions.text and path and path[0].endswith(".py"):
        run_until_encoded(context, path)
    elif captions.text:
        encode_captions(
            context, captions, output, dtype=vae.dtype, device=vae.device, batch_size=batch_size,
            collection=stored.collection, quiet=quiet,
        )  # fmt: skip
        return
    if options_of_texts := given(context, (name for name in vars(captions) if name != "text")):
        raise ConfigError(f"{' and '.join(options_of_texts)} are about captions: add --text, or leave them out")
    from kohya_bucket.cli.precompute_items import chosen, parts_of, planned, store_of
    from kohya_bucket.latents.vae.encoder import encoder_hash

    reader = stored.reader()
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
        source = chosen(path, options, recursive=recursive, captions_file=captions_file)
    recipe = stored.recipe(vae.dtype, output)
    encoder = vae.load()

    todo = parts_of(source, replace(recipe, vae=encoder_hash(encoder)), output, content_hash=hash, quiet=quiet)
    failed = _encode(todo, encoder, output, quiet, batch_size=batch_size, format=stored.format, architecture=vae.arch,
                     workers=workers, sd_scripts=reader)  # fmt: skip
    if failed:
        raise KohyaBucketError(f"{counted(failed, 'image')} could not be encoded, see above; all others are done")


def _check_config(context: typer.Context, config: Path, path: list[str], options: RuleOptions) -> None:
    what = f"--config {config} says which images and buckets there are"
    if path:
        raise ConfigError(f"{what}: leave out {' '.join(path)}")
    refuse_beside(context, what, (*options.fields, "captions_file"))


def _check_rule(context: typer.Context, options: RuleOptions) -> None:
    """Encoding takes long: nobody shall find out afterwards that it was at other sizes than was meant."""
    if given(context, ("gpus", "train_batch_size")):
        raise ConfigError("--gpus and --train-batch-size say how a --config will be trained: leave them out")
    if not given(context, ("rule", "preset", "bucket_config", "resolution")):
        raise ConfigError("choose the buckets by --resolution, --rule, --preset, --bucket-config or --config")
    if options.brings_sizes:
        sizes = ("resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")
        refuse_beside(context, f"{options.name.replace(':', ' ', 1)} brings its own sizes", sizes)


def _encode(todo: list[Part], encoder: Any, output: Path | None, quiet: bool, **options: Any) -> int:
    """Encode the parts; how many images could not be. `options` as for `encode_items`."""
    from kohya_bucket.cli.precompute_console import Shown, print_report
    from kohya_bucket.latents.encode.encode_items import encode_items
    from kohya_bucket.latents.encode.report import joined
    from kohya_bucket.latents.npz.names import paths_of_run

    further: list[PrecomputeReport] = []
    failed = 0
    console = plain_console(stderr=True)
    family = ARCHITECTURES.get(options["architecture"] or str(getattr(encoder, "architecture", "")))
    paths: list[list[Path]] | list[None] = [None] * len(todo)
    if options["format"] == "npz" and family is not None and todo:  # without one, `encode_items` says what is missing
        paths = paths_of_run(
            [part.wanted for part in todo], family.read_by(options["sd_scripts"]), output, todo[0].root
        )
    for part, npz_paths in zip(todo, paths, strict=True):
        with Shown(console, quiet) as show:
            report = encode_items(
                part.wanted, encoder, output, part.root, progress_callback=show, npz_paths=npz_paths,
                say=lambda text: console.print(text, soft_wrap=True, markup=False), **options,
            )  # fmt: skip
        failed += len(report.failed)
        if part.wanted.further:
            further.append(report)
        elif not quiet:
            print_report(report)
    if further and not quiet:
        say("at further sizes:")
        print_report(joined(further))
    return failed
