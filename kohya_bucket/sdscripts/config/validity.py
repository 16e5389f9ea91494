"""Values that sd-scripts accepts in a config and then stops at, or that do not do what they seem to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kohya_bucket.adapter.dataset_keys import adjust_to_steps, rule_for
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.errors import BucketSettingsError
from kohya_bucket.latents.architectures import ANY_TRAINER, NAME_THE_MODEL, Trainer, families_refusing
from kohya_bucket.sdscripts.config.check import CheckedConfig
from kohya_bucket.sdscripts.config.keys import Kind
from kohya_bucket.sdscripts.config.model import DatasetConfig, ImageList
from kohya_bucket.texts import counted

__all__ = ["check_split", "check_values", "note_overruled"]

_INTERPOLATIONS = ("lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area", "box")


def check_values(
    dataset: DatasetConfig, findings: Findings, trainer: Trainer = ANY_TRAINER, *, predefined: bool = False
) -> None:
    """Check what can be checked without looking at an image. `predefined`: the metadata says the buckets."""
    where = dataset.place
    if not dataset.subsets:
        message = "it has no [[datasets.subsets]], so it has no images"
        findings.error("no-subsets", where, message, "add one with an image_dir")
    if dataset.batch_size < 1:
        findings.error("batch-size", where, f"batch_size is {dataset.batch_size}", "set it to 1 or more")
    if not predefined:
        _check_bucketing(dataset, findings, trainer)
    _check_validation(dataset, findings)
    for place, value in [(where, dataset.resize_interpolation)] + [
        (s.place, s.resize_interpolation) for s in dataset.subsets
    ]:
        if value is not None and value not in _INTERPOLATIONS:
            message = f"resize_interpolation is {value!r}, which sd-scripts does not know"
            findings.error("resize-interpolation", place, message, f"one of {', '.join(_INTERPOLATIONS)}")


def _check_bucketing(dataset: DatasetConfig, findings: Findings, trainer: Trainer) -> None:
    where = dataset.place
    if dataset.resolution is None:
        findings.error("no-resolution", where, "it has no resolution, and sd-scripts needs one", "resolution = 512")
        return
    if min(dataset.resolution) < 1:
        message = f"resolution is {list(dataset.resolution)}"
        findings.error("resolution", where, message, "a size in pixels, such as 512 or 1024")
        return
    keys = dataset.dataset_keys
    if not dataset.enable_bucket:
        if not any(s.random_crop or s.face_crop_aug_range for s in dataset.subsets):
            width, height = dataset.resolution
            message = f"enable_bucket is not set: every image is cut to {width}x{height}, whatever its aspect"
            findings.note("no-buckets", where, message, "enable_bucket = true keeps the aspects")
        return
    try:
        low, high = adjust_to_steps(keys)
        rule_for(keys)
    except BucketSettingsError as error:
        findings.error("bucket-settings", where, str(error))
        return
    steps = dataset.bucket_reso_steps
    for name, given, used in (("min", dataset.min_bucket_reso, low), ("max", dataset.max_bucket_reso, high)):
        if given != used and not dataset.bucket_no_upscale:
            message = f"{name}_bucket_reso {given} is not a multiple of {steps}; sd-scripts takes {used}"
            findings.note("adjusted", where, message)
    if steps % 8:
        message = f"bucket_reso_steps is {steps}, but latents need multiples of 8"
        findings.error("bucket-steps", where, message, "64; SDXL also takes 32")
        return
    refusing = trainer.refusing(steps)
    if refusing and not trainer.title:
        message = f"bucket_reso_steps is {steps}, which the trainers of these models refuse: {families_refusing(steps)}"
        findings.note(
            "bucket-steps", where, message, f"if you train one of them, use a step that it accepts; {NAME_THE_MODEL}"
        )
    elif refusing:
        accepted = -(-steps // trainer.step) * trainer.step
        message = f"bucket_reso_steps is {steps}, which is refused by "
        if len(refusing) == len(trainer.steps):
            message += f"{trainer.title}: only multiples of {trainer.step} are accepted"
            findings.error("bucket-steps", where, message, f"bucket_reso_steps = {accepted}")
        else:
            message += ", ".join(f"{file} (multiples of {least})" for file, least in refusing.items())
            other = next(file for file in trainer.steps if file not in refusing)
            remedy = f"bucket_reso_steps = {accepted} suits all; or name the trainer, as in --arch {other}"
            findings.warning("bucket-steps", where, message, remedy)


def _check_validation(dataset: DatasetConfig, findings: Findings) -> None:
    share, where = dataset.validation_split, dataset.place
    if share == 0:
        return
    if not 0 <= share <= 1:
        remedy = f"did you mean {share / 100:g}?" if 1 < share <= 100 else "a share such as 0.1"
        findings.error("validation-split", where, f"validation_split is {share:g}, but must be from 0 to 1", remedy)
        return
    if dataset.kind is Kind.FINE_TUNING:
        message = (
            "validation_split holds nothing back in fine-tuning datasets: sd-scripts validates on all training images"
        )
        findings.warning("validation-split", where, message, "use a DreamBooth dataset, or remove it")
        return
    if dataset.kind is Kind.DREAMBOOTH and dataset.validation_seed is None:
        message = (
            "validation_split without validation_seed: sd-scripts draws both parts independently, so that images are "
            "trained and validated, and differently in each run; the parts shown here are an example"
        )
        findings.warning("validation-seed", where, message, "validation_seed = 42")
    if dataset.kind is Kind.CONTROLNET:
        message = (
            "validation_split does not validate in ControlNet datasets: the images that are held back are in neither "
            "part, and sd-scripts validates on those that it trains"
        )
        findings.warning("validation-split", where, message, "remove it")


def check_split(dataset: DatasetConfig, training: ImageList, validation: ImageList, findings: Findings) -> None:
    """Name images that are in both parts although a seed is set."""
    if dataset.kind is not Kind.DREAMBOOTH or dataset.validation_seed is None:
        return
    both = sorted(set(training.keys) & set(validation.keys))
    if both:
        are = "image is" if len(both) == 1 else "images are"
        message = f"{len(both)} {are} both trained and validated: sd-scripts rounds both parts up"
        findings.note("split-overlap", dataset.place, message, "a slightly different validation_split avoids it", both)
    if not len(validation):
        message = f"validation_split {dataset.validation_split:g} holds back no image of this dataset"
        findings.warning("empty-validation", dataset.place, message, "raise it")


def check_shared_images(datasets: list[tuple[DatasetConfig, ImageList]], findings: Findings) -> None:
    """Point out datasets that train the same files at different resolutions."""
    owner: dict[str, int] = {}
    shared: dict[tuple[int, int], list[str]] = {}
    for i, (_, images) in enumerate(datasets):
        for path in images.paths:
            full = os.path.abspath(path)
            first = owner.setdefault(full, i)
            if first != i and datasets[first][0].resolution != datasets[i][0].resolution:
                shared.setdefault((first, i), []).append(path)
    for (first, second), paths in shared.items():
        message = (
            f"{counted(len(paths), 'image', 'is', 'are')} also in dataset {datasets[first][0].number}, at another "
            "resolution; SD 1.5 and "
            "SDXL trainers until sd-scripts 0.10.1 have room for one in a latents file on disk, where sd-scripts alone "
            "takes the first for both, and this package a further file for the second (with 0.9 it refuses)"
        )
        findings.note("shared-images", datasets[second][0].place, message, "cache_latents without _to_disk is safe")


def note_overruled(given: Mapping[str, Any], checked: CheckedConfig, findings: Findings) -> None:
    """Say which command line values the config overrules. `given` is named as in the config."""
    datasets = [dataset.table for dataset in checked.datasets]
    subsets = [subset for dataset in checked.datasets for subset in dataset.subsets]
    for name, value in sorted(given.items()):
        holders = [table[name] for table in [checked.general, *datasets, *subsets] if name in table]
        if any(holder != value for holder in holders):
            message = f"--{name} {_shown(value)} is ignored, because the config has {name} = {_shown(holders[0])}"
            findings.note("overruled", "", message, "the config wins over the command line, as in sd-scripts")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
