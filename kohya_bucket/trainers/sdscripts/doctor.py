"""What keeps a training from starting, or would end it later: looked up before it does. Nothing on disk is changed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.buckets.families import NAME_THE_MODEL
from kohya_bucket.buckets.misfits import MUCH_ENLARGED, enlargement, too_long
from kohya_bucket.extras import argument, where_this_came_from
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.activation import activation, site_packages
from kohya_bucket.trainers.door.file_findings import Section, ShowProgress, repaired
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.overview import add_overview
from kohya_bucket.trainers.door.programs import Programs
from kohya_bucket.trainers.door.trial import try_adapter
from kohya_bucket.trainers.sdscripts.checkout import describe_folder, find_checkout, has_patch
from kohya_bucket.trainers.sdscripts.config import Config, Release, Severity, read_config
from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER
from kohya_bucket.trainers.sdscripts.plan import DatasetOverview, name_unreadable, overview


def config_section(
    path: Path, command_line: Mapping[str, Any], release: Release, show: ShowProgress, *,
    programs: Programs = ANY_TRAINER, decode: bool = True,
) -> tuple[Section, Config | None]:  # fmt: skip
    """Read the config as the trainer does, and look at every image that it names.

    `command_line`, `release` and `programs` are as in `read_config`. With `decode`, all images are decoded; else their
    headers are read only. Returns the config too, where it has no mistakes that stop it.

    Raises:
        KohyaBucketError: the config cannot be read at all.
    """
    read = read_config(path, command_line, release=release, programs=programs)
    checked_for = read.programs.title or f"any model; {NAME_THE_MODEL}"
    section = Section(f"config {path}", [("checked for", checked_for)], read.findings)
    options, trains, left_out = read.options, not read.findings.of(Severity.ERROR), None
    if options is not None:
        left_out = _planned(section, read, options, show)
    if left_out is None:  # the images are looked at all the same
        with show("reading image headers") as progress:
            left_out, trains = name_unreadable(read.datasets, read.findings, progress), False
    if decode:
        _decode(section, read, left_out, show, stops=options is not None and options.on_bad_image == "stop")
    return section, read if trains and options is not None else None


def _planned(section: Section, read: Config, options: AdapterOptions, show: ShowProgress) -> set[str] | None:
    """What training would be, in facts and findings; the paths of the images that no dataset trains.

    None where options keep it from being planned.
    """
    processes = 1 if read.length is None else read.length.processes
    look = partial(overview, read, options, (processes,), 1)
    seen = add_overview(section, show, "reading image headers", look)
    if seen is None:
        return None
    left_out, trained = set(seen.unreadable), set[str]()
    for dataset in seen.datasets:
        left = _name_left_out(section, dataset)
        left_out |= left
        trained.update(path for path in dataset.read.images.paths if path not in left)
        _name_misfits(section, dataset, read.path)
    return left_out - trained


def _name_left_out(section: Section, dataset: DatasetOverview) -> set[str]:
    images = dataset.read.images
    path_of = dict(zip(images.keys, images.paths, strict=True))
    if dataset.left_out:
        names = [f"{key}: {reason}" for key, reason in dataset.left_out]
        remedy = repaired({path_of[key]: reason for key, reason in dataset.left_out})
        message = (
            f"{counted(len(names), 'image')} not trained ({some(names, 1)}); sd-scripts alone would stop when it reads "
            "or loads one"
        )
        if dataset.read.config.bucket_no_upscale:
            remedy += ", or set bucket_no_upscale = false for the small ones"
        section.findings.warning("left-out", dataset.read.config.place, message, remedy, names)
    return {path_of[key] for key, _ in dataset.left_out}


def _name_misfits(section: Section, dataset: DatasetOverview, path: Path | None) -> None:
    """The images that are to be split, replaced or left out."""
    config, images = dataset.read.config, dataset.items
    if not config.enable_bucket:
        return
    lists = "" if path is None else (
        f"; `kohya-bucket analyze --config {argument(path)} --list-bad bad.txt` writes the paths into a file"
    )  # fmt: skip
    long = np.any([too_long(dataset.sizes, p) for p in images.placements], axis=0)
    losses = np.nanmax([p.crop_loss for p in images.placements], axis=0)
    if names := [f"{images.keys[i]}: {losses[i]:.0%} cut off" for i in np.flatnonzero(long).tolist()]:
        message = f"{counted(len(names), 'image')} far longer than any usual bucket ({some(names, 1)})"
        remedy = f"split or leave out{lists}"
        section.findings.of_share("too-long", config.place, message, remedy, names, len(images.keys))
    most = np.fmax.reduce([enlargement(dataset.sizes, p) for p in images.placements], axis=0)
    chosen = most > MUCH_ENLARGED
    if names := [f"{images.keys[i]}: {most[i]:.3g} times" for i in np.flatnonzero(chosen).tolist()]:
        low, high = most[chosen].min(), most[chosen].max()
        message = (
            f"{counted(len(names), 'image')} enlarged {low:.3g} to {high:.3g} times, so blurred images are trained "
            f"({some(names, 1)})"
        )
        remedy = f"replace by larger ones or leave out, or set bucket_no_upscale = true{lists}"
        section.findings.of_share("enlarged", config.place, message, remedy, names, len(images.keys))


def _decode(section: Section, read: Config, left_out: set[str], show: ShowProgress, *, stops: bool) -> None:
    tables = [(d.config, table) for d in read.datasets for table in (d.images, d.validation) if table is not None]
    then = '; training stops at the first of them, as on_bad_image = "stop" asks' if stops else (
        "; sd-scripts alone stops at the first of them, and with kohya_bucket each is named and left out when its turn "
        "comes, and another image of its bucket trains in its place"
    )  # fmt: skip
    paths = (p for _, table in tables for p in (*table.paths, *table.conditioning) if p and p not in left_out)
    masked = {
        path
        for config, table in tables
        for path, subset in zip(table.paths, table.subset.tolist(), strict=True)
        if config.subsets[subset - 1].alpha_mask
    }
    section.decode(paths, show, then, stops=stops, masked=masked)


# A checkout of sd-scripts: its version, how the adapter comes into it, whether it knows it, what it needs.


def checkout_section(folder: Path, *, imported: bool = True) -> Section:
    """Look at the checkout in `folder`; `imported`: in a process of its own, which takes as long as importing torch.

    Raises:
        CheckoutError: the folder is not a checkout.
    """
    root = find_checkout(folder)
    section = Section("sd-scripts", [("checkout", describe_folder(root)), ("starts", _how_it_starts(root))])
    if imported:
        _probe(section, root)
    return section


def _how_it_starts(root: Path) -> str:
    if has_patch(root):
        return "with kohya_bucket: the checkout is patched"
    if activation(site_packages()).active:
        return "with kohya_bucket: this Python is activated"
    return "with accelerate launch -m kohya_bucket.launch TRAINER.py …, or by itself after: kohya-bucket activate"


def _probe(section: Section, root: Path) -> None:
    # in a process of its own
    trial = try_adapter(root, "kohya_bucket.trainers.sdscripts.door", ("library.train_util", "library.config_util"))
    if trial.active:
        section.facts.append(("adapter", "every part of sd-scripts that it replaces looks as expected"))
    elif trial.refused:
        section.findings.error("adapter-refuses", "", trial.refused)
    else:
        why = f"in this environment sd-scripts cannot be imported: {trial.error}"
        section.findings.error("cannot-import", "", why, _remedy(root))
    for subject, why in trial.left_alone.items():
        section.findings.warning(
            "left-alone", subject, f"this version is known only in part: {why}; sd-scripts does that by itself",
            "update kohya-bucket, or do without what needs it",
        )  # fmt: skip


def _remedy(root: Path) -> str:
    for name in ("venv", ".venv"):
        for python in (root / name / "bin" / "python", root / name / "Scripts" / "python.exe"):
            if python.is_file() and Path(sys.prefix).resolve() != (root / name).resolve():
                command = f"{argument(python)} -m"
                return (
                    f"check the environment that you train in: {command} pip install {where_this_came_from()}, then "
                    f"{command} kohya_bucket doctor"
                )
    needed = f"pip install -r requirements.txt in {root}"
    return f"run doctor in the environment that you train in, or install here what it needs ({needed})"
