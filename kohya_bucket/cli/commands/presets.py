"""`kohya-bucket presets`: the bundled bucket sets."""

from __future__ import annotations

import json
import textwrap

import typer

from kohya_bucket.cli.common_options import AsJson
from kohya_bucket.cli.console import say

_WIDTH = 100


def register(app: typer.Typer) -> None:
    app.command()(presets)


def presets(as_json: AsJson = False) -> None:
    from kohya_bucket.buckets import list_presets, load_preset

    sets = [load_preset(name) for name in list_presets()]
    if as_json:
        rows = {
            s.name: {
                "description": s.description,
                "vae_factor": s.vae_factor,
                "n_buckets": len(s),
                "buckets": [list(b) for b in s],
            }
            for s in sets
        }
        typer.echo(json.dumps(rows, indent=2))
        return
    for s in sets:
        say(f"{s.name}  ({len(s)} buckets, multiples of {s.vae_factor})  {s.description}")
        sizes = textwrap.wrap(" ".join(map(str, s)), _WIDTH - 4)
        for line in sizes:
            say(f"    {line}")
