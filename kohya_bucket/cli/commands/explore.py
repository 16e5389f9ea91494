"""`kohya-bucket explore`: a page with every image in its bucket, which moves with the settings."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from kohya_bucket.buckets.families import FAMILIES
from kohya_bucket.cli.console import say
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import Quiet, Recursive, Workers, check_output
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.files import replace_file

_NAME = "kohya-bucket-explorer.html"
_FOCUS = "focus.jsonl"  # in a folder, it is shown with its images


def explore(
    source: Annotated[
        str | None, typer.Argument(metavar="[FOLDER|CONFIG]", help="A folder of images, or a dataset config.")
    ] = None,
    out: Path | None = opt(None, "Write the page to this file. Default: a temporary file."),
    open_: bool = opt(True, "Open it in the browser.", "--open/--no-open"),
    recursive: Recursive = True,
    workers: Workers = None,
    quiet: Quiet = False,
) -> None:
    """Without a source the page is empty: drop a folder on it. It can be kept, and sent to others."""
    check_output("--out", out, "a web page", [source])
    if out is None and not open_:
        raise KohyaBucketError("--no-open without --out would show nothing: name a file with --out")
    default = next(iter(FAMILIES.values()))
    of_config = source is not None and source.lower().endswith(".toml") and Path(source).is_file()
    begins = "" if of_config else f" and begins at {default.resolution}x{default.resolution} ({default.title})"
    page = _page(source, of_config, recursive, workers, quiet)
    target = out if out is not None else Path(tempfile.mkdtemp(prefix="kohya-bucket-")) / _NAME
    replace_file(target, page.encode("utf-8"))
    say(f"{target}: {len(page) / 1e6:.1f} MB, opens in any browser{begins}", err=True)
    if open_ and not webbrowser.open(target.absolute().as_uri()):
        say("no browser was found here: open that file in one", err=True)


def _page(source: str | None, of_config: bool, recursive: bool, workers: int | None, quiet: bool) -> str:
    from kohya_bucket.reports.explorer_page import GivenConfig, GivenFocus, render_explorer, with_repeats_of_folders
    from kohya_bucket.sdscripts.config.files import supported_extensions

    trained = supported_extensions()
    if source is None:
        return render_explorer(trained=trained)
    from kohya_bucket.adapter.placing import focus_of, refuse_conflicts
    from kohya_bucket.cli.configs import adapter_options, refuse_musubi
    from kohya_bucket.cli.sources import images_in, not_read
    from kohya_bucket.cli.subjects import Reading, images_of_config
    from kohya_bucket.sdscripts.config.model import refuse_random_crops
    from kohya_bucket.texts import read_text

    reading, path = Reading(recursive, workers=workers, quiet=quiet), Path(source)
    if path.suffix.lower() == ".json" and path.is_file():
        raise ConfigError(f"{source}: the explorer takes configs in TOML; kohya-bucket analyze --config takes this one")
    if not of_config:
        images = reading.table(images_in([source], recursive=recursive))
        images = with_repeats_of_folders(images.without(not_read(images.paths)))
        focus = GivenFocus.of(str(path / _FOCUS)) if (path / _FOCUS).is_file() else None
        return render_explorer(path.name or path.resolve().name, [images], trained=trained, focus=focus)
    refuse_musubi(path, "explore")
    config, read, findings = images_of_config(path, reading)
    adapter, tables, focus = adapter_options(config), [images for _, images in read], None
    if adapter.focus:
        for dataset, _ in read:
            refuse_random_crops(dataset.config.subsets, adapter)
            refuse_conflicts(dataset.config.dataset_keys, adapter)
        found = [focus_of(adapter, images.paths) for images in tables]
        focus = GivenFocus.of(adapter.focus, tables, [one for one in found if one is not None])
    for finding in findings:
        say(f"{finding.severity.value}: {finding.text}", err=True)
    numbers = [dataset.config.number - 1 for dataset, _ in read]
    given = GivenConfig(path.name, read_text(path), numbers)
    return render_explorer(path.name, tables, given, trained, focus)
