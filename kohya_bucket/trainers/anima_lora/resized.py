"""Whether the folder of resized images, which anima_lora trains, still is what its source would give.

Its resizing passes over every image whose resized one has the right size, however old: an edited image stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kohya_bucket.images.listing import list_images
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.captions import check_missing
from kohya_bucket.trainers.door.file_findings import Section
from kohya_bucket.trainers.door.findings import Findings

_CAPTION = ".txt"
SOURCE, RESIZED = "source_image_dir", "resized_image_dir"
"""Keys of its configs, which lora-scripts-next writes into one file; folders count from where the training starts."""


def resized_section(config: Path, keys: Mapping[str, Any]) -> Section:
    """What `kohya-bucket doctor` says of both folders. Raises `KohyaBucketError` for one that is not there."""
    of_source, of_resized = (_by_stem(str(keys[key])) for key in (SOURCE, RESIZED))
    section = Section(f"config {config}, of anima_lora")
    section.facts += [(SOURCE, counted(len(of_source), "image")), (RESIZED, counted(len(of_resized), "image"))]
    both, resize = of_source.keys() & of_resized.keys(), "resize again, with scripts/preprocess/resize_images.py"
    for code, paths, what, remedy in (
        (
            "not-resized", [of_source[stem] for stem in of_source.keys() - both],
            "without a resized one: not trained", resize,
        ),
        (
            "resized-older",
            [of_resized[stem] for stem in both if _time(of_resized[stem]) < _time(of_source[stem])],
            "older than the source: trained as that was", f"delete their caches, and {resize} --overwrite",
        ),
        (
            "resized-alone", [of_resized[stem] for stem in of_resized.keys() - both],
            "whose source is gone: trained all the same", "if they are not to be, delete them and their caches",
        ),
    ):  # fmt: skip
        if paths:
            message = f"{counted(len(paths), 'image')} {what} ({some(sorted(paths))})"
            section.findings.warning(code, "", message, remedy, paths)
    _check_captions(of_source, of_resized, section.findings)
    return section


def _check_captions(of_source: Mapping[str, str], of_resized: Mapping[str, str], findings: Findings) -> None:
    """Name the resized images that have a caption beside neither themselves nor their source, of which both are read.

    Source: `cache_text_embeddings` in anima_lora's `library/preprocess/text.py`.
    """
    bare = [
        of_source.get(stem, path)
        for stem, path in of_resized.items()
        if not any(Path(one).with_suffix(_CAPTION).exists() for one in (path, of_source.get(stem, path)))
    ]
    check_missing(bare, len(of_resized), _CAPTION, "an empty caption is trained", "", findings, key="")


def _by_stem(folder: str) -> dict[str, str]:
    """{path within the folder, without its extension: path} of each image."""
    return {Path(path).relative_to(folder).with_suffix("").as_posix(): path for path in list_images(folder)}


def _time(path: str) -> int:
    return Path(path).stat().st_mtime_ns
