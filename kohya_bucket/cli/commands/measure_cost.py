"""`kohya-bucket measure-cost`: what a model's tokens cost on this device, as lines for the config."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kohya_bucket.cli.console import plain_console, print_table, say, scan_progress
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import AsJson, Quiet, numbers_of
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.extras import pip_install

if TYPE_CHECKING:
    from kohya_bucket.planning.costs import CostFit

_SIZE = re.compile(r"\s*(\d+)\s*[xX]\s*(\d+)\s*")


def measure_cost(
    model: Annotated[str, typer.Argument(help="A model, e.g. flux or wan-1.3b; docs/sd-scripts.md lists them.")],
    sizes: str = opt("512x512,768x768,1024x1024", "Bucket sizes to time."),
    frames: str = opt("1", "Frames of clips, for models of videos, e.g. 1,25,81."),
    device: str | None = opt(None, "E.g. cuda:0 or cpu; by default the GPU, if there is one."),
    dtype: str | None = opt(None, "By default bfloat16, on a CPU float32."),
    rounds: int = opt(3, "How often each is timed, after one that is not counted.", min=1),
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Times a block of the model's width with random weights, forward and backward, and takes it times the number of
    the model's blocks. `kohya_bucket.planning.measure_cost` times a step of your own: a LoRA's, a compiled model's.
    """
    from kohya_bucket.checks import one_of
    from kohya_bucket.latents.token_grids import TOKEN_GRIDS

    grid = TOKEN_GRIDS[one_of("MODEL", model, TOKEN_GRIDS, ConfigError)]
    lengths = numbers_of("--frames", frames, (1 << 16) - 1, "1,25,81")
    shapes = [(size, n) for size in _sizes(sizes) for n in lengths]
    tokens = grid.tokens([size for size, _ in shapes], [n for _, n in shapes]).tolist()
    if len(set(tokens)) < 2:
        raise ConfigError(f"--sizes {sizes} --frames {frames} are all of {tokens[0]:,} tokens: name a second shape")
    chosen, kind = _on_device(device, dtype)
    from kohya_bucket.latents.transformer_block import measure_model

    with scan_progress("timing steps", quiet=quiet or as_json) as progress:
        fit = measure_model(grid, tokens, chosen, kind, rounds, progress, None if quiet else _say_how_long)
    where = f"{chosen}, {str(kind).removeprefix('torch.')}"
    if as_json:
        rows = [
            {"width": w, "height": h, "frames": n, "tokens": length, "seconds": taken, "fitted": fitted}
            for ((w, h), n), length, taken, fitted in zip(shapes, tokens, fit.seconds, fit.fitted.tolist(), strict=True)
        ]
        found = {"model": model, "device": where, "cost": fit.token_cost, "residual": fit.residual, "shapes": rows}
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(f"{model} on {where}: one block of width {grid.width:,}, times {grid.blocks}")
        _print(model, [f"{w}x{h}" + f", {n} frames" * (n > 1) for (w, h), n in shapes], fit)


def _say_how_long(seconds: float) -> None:
    text = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    say(f"this will take about {text}", err=True)


def _print(model: str, shapes: list[str], fit: CostFit) -> None:
    columns = zip(shapes, fit.tokens, fit.seconds, fit.fitted, fit.off, strict=True)
    rows = [
        {"shape": shape, "tokens": f"{n:,}", "seconds": f"{taken:.4g}", "fitted": f"{fitted:.4g}", "off": f"{off:+.1%}"}
        for shape, n, taken, fitted, off in columns
    ]
    print_table(plain_console(), rows)
    a, b = fit.token_cost
    most = int(fit.tokens.argmax())
    typer.echo(
        f'the fit is {fit.residual:.1%} off\n\n[kohya_bucket]\nmodel = "{model}"\n'
        f"cost = [{a:.3e}, {b:.3e}]  # seconds for L and for L * L\n"
        f"# max_cost = {fit.fitted[most]:.3g}  # seconds of a step: as one of {shapes[most]} takes"
    )


def _on_device(device: str | None, dtype: str | None) -> tuple[Any, Any]:
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise KohyaBucketError(f"timing needs {missing.name}, which is not installed: {pip_install('torch')}") from None
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from None
    name = dtype or ("float32" if chosen.type == "cpu" else "bfloat16")
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError(f"--dtype is {name!r}, but must be float32, bfloat16 or float16")
    return chosen, kind


def _sizes(text: str) -> list[tuple[int, int]]:
    found = [_SIZE.fullmatch(part) for part in text.split(",")]
    pairs = [(int(m[1]), int(m[2])) for m in found if m]
    if len(pairs) < len(found) or not all(0 < side < 1 << 16 for pair in pairs for side in pair):
        raise ConfigError(f"--sizes is {text!r}, but must be sizes such as 512x512,832x480")
    return pairs
