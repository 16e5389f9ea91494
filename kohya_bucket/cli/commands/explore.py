"""`kohya-bucket explore`: a page with every image in its bucket, which moves with the settings."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.cli.configs import is_settings
from kohya_bucket.cli.console import say
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import Quiet, Recursive, RuleArguments, check_output, refuse_beside
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.files import replace_file

if TYPE_CHECKING:
    from kohya_bucket.cli.subjects import Reading

_NAME = "kohya-bucket-explorer.html"
_FOCUS = "focus.jsonl"  # in a folder, it is shown with its images


def explore(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(metavar="[FOLDER|CONFIG]", help="A folder of images, a dataset config, or a preset of the GUI."),
    ] = None,
    out: Path | None = opt(None, "Write the page to this file. Default: a temporary file.", "--out", "--output", "-o"),
    open_: bool = opt(True, "Open it in the browser.", "--open/--no-open"),
    arch: str | None = opt(None),
    resolution: str = opt("512"),
    recursive: Recursive = True,
    workers: int | None = opt(None, usual=False, min=1),
    quiet: Quiet = False,
) -> None:
    """Without a source the page is empty: drop a folder on it. It can be kept, and sent to others."""
    check_output("--out", out, "a web page", [source])
    if out is None and not open_:
        raise KohyaBucketError("--no-open without --out would show nothing: name a file with --out")
    of_config = source is not None and is_settings(Path(source))
    if of_config:
        refuse_beside(context, f"{source} brings its own resolution", ("resolution",))
    from kohya_bucket.cli.subjects import Reading

    options = RuleArguments(resolution=resolution).for_arch(context, arch)
    begins = "" if of_config else f" and begins at {options.size[0]}x{options.size[1]}"
    reading = Reading(recursive, workers=workers, quiet=quiet)
    page = _of_config(Path(source), arch, reading) if of_config and source else _of_folder(source, reading, options)
    target = out if out is not None else Path(tempfile.mkdtemp(prefix="kohya-bucket-")) / _NAME
    replace_file(target, page.encode("utf-8"))
    say(f"{target}: {len(page) / 1e6:.1f} MB, opens in any browser{begins}", err=True)
    if open_ and not webbrowser.open(target.absolute().as_uri()):
        say("no browser was found here: open that file in one", err=True)


def _of_folder(source: str | None, reading: Reading, options: RuleArguments) -> str:
    from kohya_bucket.buckets import KohyaBuckets
    from kohya_bucket.cli.sources import images_in, not_read
    from kohya_bucket.reports.explorer_page import GivenFocus, StartSettings, render_explorer, with_repeats_of_folders
    from kohya_bucket.trainers.door.registry import usual_trainer

    rule, trained = options.make(), usual_trainer().endings()
    assert isinstance(rule, KohyaBuckets)  # no other is asked for
    settings = StartSettings(rule.max_reso, rule.min_size, rule.max_size, rule.reso_steps)
    if source is None:
        return render_explorer(trained=trained, settings=settings)
    images, path = reading.table(images_in([source], recursive=reading.recursive)), Path(source)
    images = with_repeats_of_folders(images.without(not_read(images.paths)))
    if not images.readable.any():
        raise KohyaBucketError(f"{source}: nothing to show: {images.short_name(0)}: {images.not_read[0]}")
    focus = GivenFocus.from_file(str(path / _FOCUS)) if (path / _FOCUS).is_file() else None
    name = path.name or path.resolve().name
    return render_explorer(name, [images], trained=trained, focus=focus, settings=settings)


def _of_config(path: Path, arch: str | None, reading: Reading) -> str:
    from kohya_bucket.reports.explorer_page import GivenConfig, GivenFocus, StartSettings, render_explorer
    from kohya_bucket.texts import read_text
    from kohya_bucket.trainers.door.face import Asked
    from kohya_bucket.trainers.door.registry import trainer_for

    trainer = trainer_for("explore", path)
    begin = trainer.explored(Asked(path, arch), reading)
    tables, text = begin.tables, begin.text
    focus = None if begin.focus is None else GivenFocus.from_file(begin.focus[0], tables, begin.focus[1])
    for finding in begin.findings:
        say(f"{finding.severity.value}: {finding.text}", err=True)
    if text is not None and text.suffix.lower() == ".json":
        raise KohyaBucketError(
            f"{text}: the explorer takes dataset configs in TOML; kohya-bucket analyze --config takes this one"
        )
    if text is not None:
        config = GivenConfig(text.name, read_text(text), begin.numbers)
        return render_explorer(path.name, tables, config, trainer.endings(), focus)
    # Folders that a trainer's settings name. The page saves a preset as one, and others as a dataset config.
    images, keys = tables[0], begin.keys
    if begin.regularization.any():
        say("note: regularization images are not shown, and not saved", err=True)
        images = images.take((~begin.regularization).nonzero()[0])
    settings = StartSettings(
        keys.resolution, keys.min_bucket_reso, keys.max_bucket_reso, keys.bucket_reso_steps, begin.batch_size,
        keys.bucket_no_upscale, "kohya" if keys.enable_bucket else "none",
    )  # fmt: skip
    preset = GivenConfig(path.name, read_text(path), [0]) if path.suffix.lower() == ".json" else None
    return render_explorer(path.name, [images], preset, trainer.endings(), focus, settings)
