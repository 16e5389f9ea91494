"""`precompute --text`: captions, by text encoders that are named, or by an sd-scripts trainer with its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from kohya_bucket.cli.console import plain_console, say
from kohya_bucket.cli.given import refuse_beside
from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.cli.cluster_options import ClusterOptions

__all__ = ["PrecomputeCommand", "TextOptions", "encode_captions", "run_until_encoded"]

_HOW = (
    "precompute --text encodes the captions of a store: --output latents/ --text-encoder …; or it runs an sd-scripts "
    "trainer until its captions are encoded: accelerate launch -m kohya_bucket.precompute --text flux_train_network.py "
    "--dataset_config my.toml …"
)
_USAGE = "usage: accelerate launch -m kohya_bucket.precompute --text TRAINER.py [the trainer's arguments]"
_ALLOWED = ("output", "dtype", "device", "batch_size", "collection", "quiet", "engine", "concurrency")


@dataclass(frozen=True)
class TextOptions:
    """Captions in place of images; each field is an option."""

    text: Annotated[
        bool, typer.Option("--text", help="Captions: of the store in --output, or PATH is an sd-scripts trainer.")
    ] = False
    text_encoder: Annotated[
        list[str] | None, typer.Option(help="With --text: CLIP or T5, hub name or folder; may be repeated.")
    ] = None
    max_length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of each text encoder, in their order; else its tokenizer's.")
    ] = None
    layer: Annotated[int, typer.Option(help="Hidden state of text encoders: -1 the last, -2 as for SDXL.")] = -1
    apply_mask: Annotated[
        bool, typer.Option("--apply-mask", help="Text encoders leave out padding, which is 0 then.")
    ] = False


class PrecomputeCommand(TyperCommand):
    """What follows a trainer's name are the trainer's arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        trainer = next((k for k, arg in enumerate(args) if arg.endswith(".py")), 0)
        if "--text" in args[:trainer]:
            args = [*args[:trainer], "--", *args[trainer:]]
        return super().parse_args(ctx, args)


def run_until_encoded(context: typer.Context, arguments: list[str]) -> None:
    """Run a trainer until the outputs of its text encoders are cached.

    Raises:
        ConfigError: options of this command, which the trainer would not know of.
    """
    from kohya_bucket.launch import run_trainer
    from kohya_bucket.sdscripts.caching.text import encode_ahead

    others = [name for name in context.params if name not in ("path", "text", "quiet")]
    refuse_beside(context, f"{arguments[0]} encodes captions with its own arguments, which follow its name", others)
    encode_ahead(True)
    run_trainer(arguments[0], arguments[1:], _USAGE)
    raise ConfigError(f"{arguments[0]} ended before it made a loader of sd-scripts' data sets: nothing was encoded")


def encode_captions(
    context: typer.Context, options: TextOptions, output: Path | None, *, dtype: str, device: str | None,
    batch_size: int, collection: str, quiet: bool, cluster: ClusterOptions,
) -> None:  # fmt: skip
    """Encode what is missing of the captions of the store in `output`.

    Raises:
        KohyaBucketError: no store or no encoder is named, or options that belong to images; else as what is called.
    """
    if output is None or not options.text_encoder:
        raise ConfigError(_HOW)
    what, own = f"--text encodes the captions of {output}", ("path", *_ALLOWED, *vars(options))
    if path := context.params["path"]:
        raise ConfigError(f"{what}: leave out {' '.join(path)}")
    refuse_beside(context, what, [name for name in context.params if name not in own])
    from kohya_bucket.cli.precompute_console import Shown
    from kohya_bucket.latents.encode.precompute import launched
    from kohya_bucket.latents.store.latent_store import LatentStore
    from kohya_bucket.latents.text.precompute_text import precompute_text
    from kohya_bucket.latents.text.transformers_encoder import load_text_encoder

    on_ray = cluster.on_ray()
    LatentStore(output)  # no model is loaded for a store that is not there
    load = partial(
        load_text_encoder, options.text_encoder, lengths=options.max_length or [], dtype=dtype, device=device,
        layer=options.layer, apply_mask=options.apply_mask,
    )  # fmt: skip
    console, name = plain_console(stderr=True), collection or "text"
    with Shown(console, quiet) as show:
        if on_ray:
            from kohya_bucket.latents.on_ray.text import text_on_ray

            report = text_on_ray(
                output, load, name=name, batch_size=batch_size, concurrency=cluster.concurrency,
                on_gpu=not (device or "").startswith("cpu"), progress=show,
                say=lambda text: console.print(text, soft_wrap=True, markup=False),
            )  # fmt: skip
        else:
            rank, processes = launched()
            report = precompute_text(
                output, load(), name=name, batch_size=batch_size, progress=show, rank=rank, processes=processes
            )
    if not quiet:
        for reason, n in report.reasons.items():
            say(f"{n} to do: {reason}")
        say(f"{report.encoded} encoded, {report.current} were current; {counted(report.total, 'caption')}, {output}")
