"""What is said of images and clips that a trainer lists, or passes over: findings about files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_bucket.images.clips import ClipScan
from kohya_bucket.images.formats import what_to_do
from kohya_bucket.images.headers import say_orientations
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.pixels import DecodedImages, decode_all
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.findings import Findings, Severity, fix_command

ShowProgress = Callable[[str], AbstractContextManager[Progress | None]]
"""Makes a progress function for a title."""


@dataclass
class Section:
    """One part of what the doctor says.

    Attributes:
        title: what was looked at.
        facts: (name, value) of what is as it is.
        findings: what is wrong with it, and what to do.
    """

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)

    @property
    def stops(self) -> bool:
        """Something here would stop the training, or the trainer without this package."""
        return bool(self.findings.of(Severity.ERROR)) or any(finding.stops_alone for finding in self.findings)

    def decode(
        self, paths: Iterable[str], show: ShowProgress, then: str, *, stops: bool, masked: Collection[str] = ()
    ) -> None:
        """Decode images, and name those that cannot be, or that are trained as something else than people see.

        Args:
            then: what the trainer does at one that cannot be decoded: an error where it `stops`.
            masked: of which images transparency is used as a mask.
        """
        images = list(dict.fromkeys(paths))
        with show("decoding every image") as progress:
            decoded = decode_all(images, progress)
        bad = decoded.broken
        self.facts.append(("decoded", f"{counted(len(images), 'image')}, {len(bad):,} of them cannot be decoded"))
        if bad:
            names = [f"{path}: {reason}" for path, reason in bad.items()]
            message = f"{counted(len(bad), 'image')} that cannot be decoded ({some(names, 1)}){then}"
            report = self.findings.error if stops else self.findings.warning
            report("undecodable", "", message, repaired(bad), names)
        check_pixels(decoded, len(images), self.findings, masked)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = [{"name": name, "text": text} for name, text in self.facts]
        return {"title": self.title, "facts": facts, "findings": [f.as_dict() for f in self.findings]}


def repaired(reasons: Mapping[str, str]) -> str:
    """What to do about images that cannot be read, given with the reason of each."""
    remedy = what_to_do(*reasons.values())
    repairable = [path for path, reason in reasons.items() if "repair" in what_to_do(reason)]
    return f"{remedy}; {fix_command(repairable)} sets aside what cannot be decoded" if repairable else remedy


def check_pixels(pixels: DecodedImages, total: int, findings: Findings, masked: Collection[str] = ()) -> None:
    """Name the images, of `total`, whose pixels a trainer takes for others than people see."""
    if pixels.deep:
        message = f"{counted(len(pixels.deep), 'image')} of 16-bit grey, of which trainers read nearly all as white "
        remedy = fix_command(pixels.deep)
        findings.of_share("deep-grey", "", f"{message}({some(pixels.deep, 2)})", remedy, pixels.deep, total)
    if shown := [path for path in pixels.transparent if path not in masked]:
        message = f"{counted(len(shown), 'image')} with transparent parts, of which the colours underneath are trained "
        remedy = "put them onto a background of the colour that is meant"
        findings.of_share("transparent", "", f"{message}({some(shown, 2)})", remedy, shown, total)


def check_ignored(paths: Sequence[str], trainer: str, place: str, findings: Findings, otherwise: str = "") -> None:
    """Name the files that a trainer's listing passes over, though their names say that they are images."""
    if paths:
        names = [Path(path).name for path in paths]
        message = f"{counted(len(paths), 'file', 'is', 'are')} named like an image, and {trainer} does not list such "
        remedy = f"{fix_command(paths)} converts or renames them{otherwise}"
        findings.warning("ignored-files", place, f"{message}names ({some(names)})", remedy, paths)


def note_subfolders(
    paths: Sequence[str], trainer: str, place: str, table: str, findings: Findings, what: str = "image"
) -> None:
    """Name what lies in subfolders of a folder of which a trainer lists only its own files; `table` names a folder."""
    if paths:
        message = f"{counted(len(paths), what, 'lies', 'lie')} in subfolders, which {trainer} does not search "
        remedy = f"to train them, name each folder in a {table} of its own"
        findings.note("subfolders", place, f"{message}({some(paths)})", remedy, paths)


def check_turned(
    paths: Sequence[str], orientations: Sequence[int], trainer: str, place: str, findings: Findings
) -> None:
    """Name images that EXIF asks to turn or mirror, for a trainer that takes the pixels as they are stored."""
    turned = [path for path, orientation in zip(paths, orientations, strict=True) if orientation > 1]
    if turned:
        asked = say_orientations([one for one in orientations if one > 1])
        message = f"{counted(len(turned), 'image')} with an EXIF turn or mirroring, which {trainer} ignores ({asked}): "
        remedy = fix_command(turned)
        findings.of_share("turned", place, f"{message}{some(turned, 2)}", remedy, turned, len(paths))


def check_clips(scan: ClipScan, trainer: str, place: str, findings: Findings) -> None:
    """Name clips of which a trainer silently takes less than is meant."""
    if scan.flaws:
        names = [f"{scan.paths[i]} {why}" for i, why in scan.flaws.items()]
        message = f"{counted(len(names), 'clip')} of which {trainer} takes what is there: {some(names, 2)}"
        findings.warning("clip-flaws", place, message, "get or encode them again, with one video stream", names)
