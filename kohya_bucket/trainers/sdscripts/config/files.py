"""What is said of a folder of images that sd-scripts reads: missing, passed over, of one name; and its captions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from kohya_bucket.checks import path_meant, quoted
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.formats import is_listed
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door import captions as caption_files
from kohya_bucket.trainers.door.captions import check_broken, check_missing
from kohya_bucket.trainers.door.file_findings import check_ignored
from kohya_bucket.trainers.door.file_names import check_names
from kohya_bucket.trainers.door.findings import Findings, Severity
from kohya_bucket.trainers.sdscripts.config.caches import check_captions
from kohya_bucket.trainers.sdscripts.config.keys import DEFAULTS, DatasetConfig, SubsetConfig
from kohya_bucket.trainers.sdscripts.dataset_images import WITH_PLUGIN, Folder, read_folder


def note_ignored(folder: Folder, findings: Findings, where: str) -> None:
    """Name files that look like images, or are, and are not read."""
    every = [os.path.join(folder.path, name) for name in sorted(filter(is_listed, folder.names))]
    check_names(every, "sd-scripts", where, findings)
    endings = {os.path.splitext(name)[1].lower() for name in folder.ignored}
    plugins = [plugin for ending, (plugin, _) in WITH_PLUGIN.items() if ending in endings]
    otherwise = f"; or pip install {' '.join(plugins)}" if plugins else ""
    paths = [os.path.join(folder.path, name) for name in folder.ignored]
    check_ignored(paths, "sd-scripts", where, findings, otherwise)


def missing_folder(key: str, path: str, findings: Findings, where: str, base: Path | None) -> None:
    """Name a missing folder, and what the mistake may be. `base` is the config file's folder."""
    what = "is not a folder"
    if os.path.isfile(path):
        what, remedy = "is a file, not a folder", "give the folder that holds it"
    else:
        remedy = remedy_for_missing(path, base)
    findings.error("missing-folder", where, f"{key} {quoted(path)} {what}", remedy, (path,))


def remedy_for_missing(path: str, base: Path | None) -> str:
    """What to do about a path that leads nowhere. `base` is the config file's folder."""
    if any(ord(c) < 32 for c in path):
        escapes = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\b": r"\b", "\f": r"\f"}
        typed = "".join(escapes.get(c, c) for c in path)
        return (
            "it holds control characters, because a backslash in double quotes starts an escape; put Windows paths in "
            f"single quotes: '{typed}'"
        )
    if base is not None and not os.path.isabs(path) and os.path.exists(base / path):  # of any name
        return (
            f"sd-scripts looks in the current folder ({os.getcwd()}). It exists beside the config file: "
            f"run from {quoted(base)}, or write {quoted(base / path)}"
        )
    return path_meant(path)


# Caption files: which images have one, and what is wrong with them.
#
# Source: `read_caption` in sd-scripts' `DreamBoothDataset`: `<image without extension><caption_extension>`, or the
# same without the last four `_` parts of the path (face positions); the first line counts.


def read_captions(
    dataset: DatasetConfig, subset: SubsetConfig, images: Sequence[str], findings: Findings
) -> list[str | None]:
    """The captions that sd-scripts trains of images of a folder; None where there is none.

    The first line of an image's file, or with `enable_wildcard` all lines that are not blank; the class tokens where
    there is no file. Images without a file, files at which sd-scripts stops, and what of captions is not trained, are
    named.
    """
    texts, broken, missing = _texts_beside(images, subset.caption_extension)
    check_broken(broken, "sd-scripts", subset.place, findings)
    deliberate = subset.class_tokens is not None or subset.is_reg
    if missing:
        instead = "an empty caption" if subset.class_tokens is None else f"the class tokens {subset.class_tokens!r}"
        check_missing(
            missing, len(images), subset.caption_extension, f"{instead} would be trained", subset.place, findings,
            default=DEFAULTS["caption_extension"], severity=Severity.NOTE if deliberate else None,
        )  # fmt: skip
    captions, cut = list[str | None](), list[str]()
    for image, text in zip(images, texts, strict=True):
        caption = subset.class_tokens
        if text:
            lines = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
            caption = "\n".join(filter(None, lines)) if subset.enable_wildcard else lines[0]
            cut += [image] if any(lines[1:]) and not subset.enable_wildcard else []
        captions.append(caption)
    check_captions(dataset, subset, list(zip(images, captions, strict=True)), cut, findings)
    return captions


def _texts_beside(images: Sequence[str], ending: str) -> tuple[list[str | None], dict[str, str], list[str]]:
    """The texts of N images' caption files, {file: why} of those at which sd-scripts stops, and the images that have no
    file."""
    stems = [os.path.splitext(image)[0] for image in images]
    files = [stem + ending for stem in stems]
    texts, broken = caption_files.read_captions(files, folders_stop=False)
    bare = [i for i, text in enumerate(texts) if text is None and files[i] not in broken]
    # Else the four numbers of a face's position are left out of the name.
    faces = {i: parts[0] + ending for i in bare if len(parts := stems[i].rsplit("_", 4)) == 5}
    texts_of_faces, broken_of_faces = caption_files.read_captions(list(faces.values()), folders_stop=False)
    for (i, file), text in zip(faces.items(), texts_of_faces, strict=True):
        files[i], texts[i] = file, text
    broken |= broken_of_faces | {file: "it is empty" for file, text in zip(files, texts, strict=True) if text == ""}
    return texts, broken, [images[i] for i in bare if texts[i] is None and files[i] not in broken]


def refuse_broken_captions(folders: Iterable[tuple[str, str]]) -> None:
    """Raise `ConfigError` where (folder, ending of its captions) hold caption files at which sd-scripts stops."""
    findings = Findings()
    for folder, ending in dict.fromkeys(folders):
        images = read_folder(folder).images if os.path.isdir(folder) else []
        check_broken(_texts_beside(images, ending)[1], "sd-scripts", "", findings)
    if len(findings):
        raise ConfigError("; ".join(finding.text for finding in findings))


def check_stems(images: Sequence[str], place: str, findings: Findings) -> None:
    """Name images that differ in nothing but the extension."""
    stems = [os.path.splitext(path)[0] for path in images]
    counts = Counter(stems) if len(set(stems)) < len(stems) else Counter()
    shared = [path for path, stem in zip(images, stems, strict=True) if counts[stem] > 1]
    if shared:
        message = f"{counted(len(shared), 'image', 'differs', 'differ')} from another one by the extension only: they "
        message += f"share one caption and, where their sizes are equal, one latents cache file ({some(shared)})"
        findings.warning("same-stem", place, message, "rename one of each", shared)


READ_AGAIN = "leave it as it is, and run again once it can be read"
"""What to do about a file that cannot be read now, whatever is in it."""
