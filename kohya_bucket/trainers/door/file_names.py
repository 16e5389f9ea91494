"""Files in a dataset's folder whose names say something else than what they are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kohya_bucket.images.formats import IMAGE_EXTENSIONS, ImageFormat, format_of_extension, sniff
from kohya_bucket.images.scan import Job, ScanTask
from kohya_bucket.inputs import open_input
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.findings import Findings

_HEAD = 32
_ENDINGS = "|".join(sorted(ending[1:] for ending in IMAGE_EXTENSIONS))
_BEHIND = re.compile(rf"\.({_ENDINGS})([^a-z0-9.].*|\.[^.]*)", re.IGNORECASE)
_OTHERS = frozenset((".txt", ".caption", ".tags", ".json", ".npz", ".npy", ".safetensors", ".pt", ".xml"))


def without_junk(paths: Sequence[str]) -> list[str]:
    """The paths without those that an editor names like an image, `~$a.png`, and that hold none."""
    named = [path for path in paths if Path(path).name.startswith("~") and format_of_extension(Path(path).suffix)]
    junk = {path for path, other in zip(named, _first_bytes(named)["other"].tolist(), strict=True) if other}
    return [path for path in paths if path not in junk]


def check_names(paths: Sequence[str], trainer: str, place: str, findings: Findings) -> None:
    """Name the pictures among a folder's files that no trainer lists by their names, and names equal but for case."""
    odd = [path for path in paths if _may_be_picture(Path(path))]
    if hidden := [path for path, image in zip(odd, _first_bytes(odd)["image"].tolist(), strict=True) if image]:
        message = f"{counted(len(hidden), 'file', 'is', 'are')} an image by content and not by name, so that {trainer} "
        message += (
            f"does not list {'it' if len(hidden) == 1 else 'them'} ({some([Path(path).name for path in hidden])})"
        )
        findings.of_share("hidden-images", place, message, "rename what is to be trained", hidden, len(paths))
    alike: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        if format_of_extension(Path(path).suffix):
            alike[path.casefold()].append(path)
    if twins := [path for group in alike.values() if len(group) > 1 for path in group]:
        message = (
            f"{counted(len(twins), 'image')} whose names differ by case alone, and are one file on Windows and macOS "
        )
        findings.note("same-but-case", place, f"{message}({some([Path(path).name for path in twins])})", names=twins)


def _may_be_picture(path: Path) -> bool:
    suffix = path.suffix.lower()
    return not format_of_extension(suffix) and suffix not in _OTHERS and (not suffix or bool(_BEHIND.search(path.name)))


def _first_bytes(paths: Sequence[str]) -> Any:
    """Columns `image` and `other` of files: both are False of one that cannot be read now."""
    return Job(ScanTask(_kind, [("image", "?"), ("other", "?")]), paths).run().rows


def _kind(path: str) -> tuple[bool, bool]:
    with open_input(path) as file:
        is_image = sniff(file.read(_HEAD)) is not ImageFormat.UNKNOWN
    return is_image, not is_image
