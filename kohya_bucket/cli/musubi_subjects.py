"""The data sets of a musubi-tuner config, as reports take them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kohya_bucket.adapter.findings import Finding, Severity
from kohya_bucket.cli.subjects import Reading
from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.architectures import Trainer
from kohya_bucket.musubi.architectures import architecture_named
from kohya_bucket.musubi.config import ClipKeys, read_config
from kohya_bucket.musubi.listing import list_items
from kohya_bucket.musubi.rules import ANY, clip_rule, picture_rule, rates_of
from kohya_bucket.reports.subject import ImageTable, Subject

__all__ = ["from_musubi_config"]


def from_musubi_config(
    path: Path, arch: str | None, batch_size: int | None, reading: Reading
) -> tuple[list[Subject], list[Finding]]:
    """Every data set of a config, and what is wrong with it.

    Raises:
        ConfigError: the config cannot be read, or names nothing that is there.
    """
    read = read_config(path, None if arch is None else architecture_named(arch))
    model = read.architecture or ANY
    trainer = Trainer(f"{model.title} in musubi-tuner", {"musubi-tuner": model.steps})
    subjects = []
    if wrong := read.findings.of(Severity.ERROR):
        raise ConfigError(f"{path}: {wrong[0].text}")
    for number, (keys, place) in enumerate(zip(read.datasets, read.places, strict=True), 1):
        listed = list_items(keys, place, read.findings, read.architecture)
        if not listed.paths:
            continue
        name = f"{path.stem}, dataset {number}" if len(read.datasets) > 1 else path.stem
        batch = batch_size or keys.batch_size
        rule, facts = picture_rule(keys, read.architecture), None
        if isinstance(keys, ClipKeys):
            facts, images = reading.clips(listed.paths)
            sizes, frames = facts.scan.sizes, facts.scan.frames
            rates = rates_of(keys, read.architecture, facts.scan.fps)
            facts = replace(facts, placement=clip_rule(keys, read.architecture).place(sizes, frames, rates))
        else:
            images = reading.table(listed.paths)
            images = images.without(reading.undecodable(images))
        endings = () if keys.caption_extension is None else (keys.caption_extension,)
        images = _repeated(images, keys.num_repeats, endings)
        subjects.append(Subject(name, images, rule, batch, str(path), trainer, facts))
    findings = [finding for finding in read.findings if finding.severity is not Severity.NOTE]
    if not subjects:
        reasons = "; ".join(finding.text for finding in findings[:3])
        raise ConfigError(f"{path}: no data set with images or clips in it: {reasons}")
    return subjects, findings


def _repeated(images: ImageTable, times: int, endings: tuple[str, ...]) -> ImageTable:
    return replace(images, repeats=images.repeats * max(times, 0), captions=endings or images.captions)
