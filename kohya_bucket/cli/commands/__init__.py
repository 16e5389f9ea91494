"""The commands, in the order of the help, with the line that says what each does.

`register(app)` of its module adds a command to a typer app: `measure-cost` is in `measure_cost.py`, and `HOMES` names
the modules that have several. `version` is here.
"""

import typer

from kohya_bucket._version import __version__

COMMANDS = {
    "analyze": "Check a data set before training: buckets, crops, outliers, broken files, and what to change.",
    "buckets-from-dataset": "Make a bucket set from the aspects of your images, and print what it crops.",
    "build-cache": "Read the size of every image into a Parquet file, so that later runs open none of them.",
    "chart": "Show which aspects go to which bucket: a table, or with --output a picture.",
    "compare": "Compare rules, also those of other trainers, on your images: crops, upscaling, batches.",
    "doctor": "Look at this environment, a checkout of sd-scripts, and a config with its images and caches.",
    "explore": "Open a page that shows every image in its bucket, and moves with the settings; drop folders on it.",
    "measure-cost": "Time what a model's tokens cost on this device, for batches of equal cost.",
    "plan": "Show what a dataset config trains: buckets, batches, crops, what is left out, steps per epoch.",
    "precompute": "Encode images with a VAE once; run it again at any time, and it does only what is missing or stale.",
    "presets": "List the bundled bucket sets and their sizes.",
    "simulate": "Explain one image: its bucket, the neighbours, the switching points, resize and crop.",
    "version": "Print the version.",
    "cache": "Check, clean up and move stored latents.",
    "patch": "Install the adapter permanently into an sd-scripts checkout, or remove it.",
}

HOMES = {
    "buckets-from-dataset": ".bucket_sets",
    "chart": ".bucket_sets",
    "explore": ".analyze",
    "presets": ".bucket_sets",
    "version": "",
}


def register(app: typer.Typer) -> None:
    app.command()(version)


def version() -> None:
    typer.echo(__version__)
