"""`kohya-bucket explore`: a page with every image in its bucket, which moves with the settings."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.cli.configs import SETTINGS, Arch
from kohya_bucket.cli.console import say
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import Quiet, Recursive, RuleArguments, Workers, check_output, refuse_beside
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.files import replace_file

if TYPE_CHECKING:
    from kohya_bucket.cli.subjects import Reading
    from kohya_bucket.reports.explorer_page import GivenFocus
    from kohya_bucket.reports.subject import ImageTable
    from kohya_bucket.trainers.sdscripts.config import ReadDataset

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
    arch: Arch = None,
    resolution: str = opt("512", "512 or 832,1216, where no config says it."),
    recursive: Recursive = True,
    workers: Workers = None,
    quiet: Quiet = False,
) -> None:
    """Without a source the page is empty: drop a folder on it. It can be kept, and sent to others."""
    check_output("--out", out, "a web page", [source])
    if out is None and not open_:
        raise KohyaBucketError("--no-open without --out would show nothing: name a file with --out")
    of_config = source is not None and Path(source).suffix.lower() in SETTINGS and Path(source).is_file()
    if of_config:
        refuse_beside(context, f"{source} brings its own resolution", ("resolution",))
    from kohya_bucket.cli.subjects import Reading
    from kohya_bucket.reports.trainers import trainer_at_hand
    from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER

    options = RuleArguments(resolution=resolution).for_arch(context, arch)
    begins = "" if of_config else f" and begins at {options.size[0]}x{options.size[1]}"
    trainer = trainer_at_hand(arch, None, Path(source)) if of_config and source else ANY_TRAINER
    reading = Reading(recursive, workers=workers, quiet=quiet, trainer=trainer)
    page = _of_config(Path(source), reading) if of_config and source else _of_folder(source, reading, options)
    target = out if out is not None else Path(tempfile.mkdtemp(prefix="kohya-bucket-")) / _NAME
    replace_file(target, page.encode("utf-8"))
    say(f"{target}: {len(page) / 1e6:.1f} MB, opens in any browser{begins}", err=True)
    if open_ and not webbrowser.open(target.absolute().as_uri()):
        say("no browser was found here: open that file in one", err=True)


def _of_folder(source: str | None, reading: Reading, options: RuleArguments) -> str:
    from kohya_bucket.buckets import KohyaBuckets
    from kohya_bucket.cli.sources import images_in, not_read
    from kohya_bucket.reports.explorer_page import GivenFocus, StartSettings, render_explorer, with_repeats_of_folders
    from kohya_bucket.trainers.sdscripts.config.files import supported_extensions

    rule = options.make()
    assert isinstance(rule, KohyaBuckets)  # no other is asked for
    settings = StartSettings(rule.max_reso, rule.min_size, rule.max_size, rule.reso_steps)
    if source is None:
        return render_explorer(trained=supported_extensions(), settings=settings)
    images, path = reading.table(images_in([source], recursive=reading.recursive)), Path(source)
    images = with_repeats_of_folders(images.without(not_read(images.paths)))
    focus = GivenFocus.of(str(path / _FOCUS)) if (path / _FOCUS).is_file() else None
    name = path.name or path.resolve().name
    return render_explorer(name, [images], trained=supported_extensions(), focus=focus, settings=settings)


def _of_config(path: Path, reading: Reading) -> str:
    from kohya_bucket.cli.configs import adapter_options, refuse_others
    from kohya_bucket.cli.subjects import images_of_config
    from kohya_bucket.reports.explorer_page import GivenConfig, GivenFocus, render_explorer
    from kohya_bucket.texts import read_text
    from kohya_bucket.trainers.door.placing import focus_of, refuse_conflicts
    from kohya_bucket.trainers.sdscripts.config.files import supported_extensions
    from kohya_bucket.trainers.sdscripts.config.model import refuse_random_crops

    refuse_others(path, "explore")
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
    text = config.path
    if text is not None and text.suffix.lower() == ".json":
        raise KohyaBucketError(
            f"{text}: the explorer takes dataset configs in TOML; kohya-bucket analyze --config takes this one"
        )
    if text is not None:
        given = GivenConfig(text.name, read_text(text), [dataset.config.number - 1 for dataset, _ in read])
        return render_explorer(path.name, tables, given, supported_extensions(), focus)
    return _of_settings(path, read[0][0], tables[0], focus)


def _of_settings(path: Path, dataset: ReadDataset, images: ImageTable, focus: GivenFocus | None) -> str:
    """The page of folders that a trainer's settings name. It saves a preset as one, and others as a dataset config."""
    import numpy as np

    from kohya_bucket.reports.explorer_page import GivenConfig, StartSettings, render_explorer
    from kohya_bucket.texts import read_text
    from kohya_bucket.trainers.sdscripts.config.files import supported_extensions

    keys = dataset.config
    if dataset.images.is_reg.any():
        say("note: regularization images are not shown, and not saved", err=True)
        images = images.take(np.flatnonzero(~dataset.images.is_reg))
    settings = StartSettings(
        keys.resolution or (512, 512), keys.min_bucket_reso, keys.max_bucket_reso, keys.bucket_reso_steps,
        keys.batch_size, keys.bucket_no_upscale, "kohya" if keys.enable_bucket else "none",
    )  # fmt: skip
    preset = path.suffix.lower() == ".json"
    given = GivenConfig(path.name, read_text(path), [0]) if preset else None
    return render_explorer(path.name, [images], given, supported_extensions(), focus, settings)
