"""Which files of a folder sd-scripts takes for images, and what to say about a folder that is not there.

Source: sd-scripts' `IMAGE_EXTENSIONS` and `glob_images`: one level, no hidden files, extensions in all lower or all
upper case (on Windows in any case), sorted by path.
"""

from __future__ import annotations

import difflib
import importlib.util
import ntpath
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.texts import counted, some

__all__ = ["Folder", "image_named", "missing_folder", "read_folder", "supported_extensions"]

_ALWAYS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_WITH_PLUGIN = {".avif": ("pillow_avif",), ".jxl": ("pillow_jxl", "jxlpy")}
_NOT_READ = frozenset(
    {".gif", ".tif", ".tiff", ".heic", ".heif", ".jfif", ".jpe", ".jp2", ".psd", ".tga", *_WITH_PLUGIN}
)
_PLUGIN_NAMES = {".avif": "pillow-avif-plugin", ".jxl": "pillow-jxl-plugin"}


@lru_cache(maxsize=1)
def supported_extensions() -> frozenset[str]:
    """The extensions that sd-scripts reads in this environment: AVIF and JPEG XL need their plugins."""
    found = list(_ALWAYS)
    for extension, modules in _WITH_PLUGIN.items():
        if any(importlib.util.find_spec(module) for module in modules):
            found.append(extension)
    return frozenset(found) | frozenset(e.upper() for e in found)


def image_named(name: str) -> str | None:
    """The image whose path is `name` and an extension: of several, the one that sd-scripts takes."""
    return next((name + e for e in sorted(supported_extensions()) if os.path.lexists(name + e)), None)


@dataclass(frozen=True)
class Folder:
    """One folder's content.

    Attributes:
        path: the folder, as the config spells it.
        images: paths of its images in sd-scripts' order.
        names: the names of all its entries.
        ignored: names that look like images and are not read.
        folders: names of its subfolders.
    """

    path: str
    images: list[str] = field(default_factory=list)
    names: frozenset[str] = frozenset()
    ignored: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


def read_folder(path: str) -> Folder:
    """List a folder. Nothing is opened.

    Raises:
        OSError: the folder cannot be listed.
    """
    known = supported_extensions()
    # The prefix that glob gives its results: without doubled or trailing separators.
    prefix = os.path.split(os.path.join(path, "*"))[0]
    names, images, ignored, folders = [], [], [], []
    with os.scandir(prefix or os.curdir) as entries:
        for entry in entries:
            name = entry.name
            names.append(name)
            extension = os.path.splitext(name)[1]
            if name.startswith("."):
                continue
            if (extension.lower() if os.name == "nt" else extension) in known:
                images.append(os.path.join(prefix, name))
            elif extension.lower() in known or extension.lower() in _NOT_READ:
                ignored.append(name)
            elif entry.is_dir():
                folders.append(name)
    images.sort()
    return Folder(path, images, frozenset(names), sorted(ignored), sorted(folders))


def note_ignored(folder: Folder, findings: Findings, where: str) -> None:
    """Say which files of a folder look like images and are passed over."""
    if not folder.ignored:
        return
    extensions = sorted({os.path.splitext(name)[1] for name in folder.ignored})
    plugins = sorted({_PLUGIN_NAMES[e.lower()] for e in extensions if e.lower() in _PLUGIN_NAMES})
    if plugins:
        remedy = f"pip install {' '.join(plugins)}, or convert them"
    elif any(e.lower() in supported_extensions() for e in extensions):
        remedy = "write the extension in all lower or all upper case"
    else:
        remedy = "convert to PNG, JPEG or WebP"
    files = counted(len(folder.ignored), "file")
    look = "looks like an image" if len(folder.ignored) == 1 else "look like images"
    findings.warning(
        "ignored-files",
        where,
        f"{files} in {folder.path!r} {look}, but sd-scripts does not read {' or '.join(extensions)} "
        f"({some(folder.ignored)})",
        remedy,
        folder.ignored,
    )


def missing_folder(key: str, path: str, findings: Findings, where: str, base: Path | None) -> None:
    """Say that a folder is not there, and why that may be. `base` is the config file's folder."""
    message = f"{key} {path!r} is not a folder"
    if os.path.isfile(path):
        message, remedy = f"{key} {path!r} is a file, not a folder", "give the folder that holds it"
    elif any(ord(c) < 32 for c in path):
        remedy = (
            "it holds control characters, because a backslash in double quotes starts an escape; "
            f"put Windows paths in single quotes: {key} = {as_typed(path)}"
        )
    elif os.name != "nt" and (ntpath.splitdrive(path)[0] or "\\" in path):
        remedy = "this is a Windows path, and this system uses forward slashes and no drive letters"
    elif path != path.strip():
        remedy = "it starts or ends with a space"
    elif base is not None and not os.path.isabs(path) and (base / path).is_dir():
        remedy = (
            f"sd-scripts looks in the current folder ({os.getcwd()}). It exists beside the config file: "
            f"run from {str(base)!r}, or write {str(base / path)!r}"
        )
    else:
        near = _nearest_sibling(path)
        remedy = f"did you mean {near!r}?" if near else _how_far(path)
    findings.error("missing-folder", where, message, remedy, (path,))


def as_typed(path: str) -> str:
    """A path whose backslashes were taken for escapes, as it was typed, in single quotes."""
    escapes = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\b": r"\b", "\f": r"\f"}
    return "'" + "".join(escapes.get(c, c) for c in path) + "'"


def _nearest_sibling(path: str) -> str | None:
    parent, name = os.path.split(os.path.normpath(path))
    try:
        siblings = [e.name for e in os.scandir(parent or os.curdir) if e.is_dir()]
    except OSError:
        return None
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    return os.path.join(parent, close[0]) if close else None


def _how_far(path: str) -> str:
    """Up to where the path exists."""
    parent = Path(path)
    for ancestor in parent.parents:
        if ancestor.is_dir():
            shown = ancestor if ancestor != Path() else Path.cwd()
            return f"{str(shown)!r} exists and holds no {parent.relative_to(ancestor).parts[0]!r}"
    return "correct the path"
