"""The images of a dataset: from folders, patterns, lists, or a mixture; and their full paths.

This is general on purpose. What a trainer lists itself (for sd-scripts one folder, no subfolders, its own endings) is
decided elsewhere.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import chain

from kohya_bucket.checks import as_flag, path_meant
from kohya_bucket.errors import KohyaBucketError, UnreadableError, may_pass, reading
from kohya_bucket.images.formats import IMAGE_EXTENSIONS, is_listed
from kohya_bucket.images.remote import is_url, list_remote
from kohya_bucket.inputs import MAX_TABLE_BYTES, may_be_file
from kohya_bucket.texts import read_text


def absolute_paths(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """`os.path.abspath` of each; addresses unchanged. `KohyaBucketError` if `paths` is a single path."""
    refuse_one_path(paths)
    return [text if is_url(text := os.fspath(path)) else os.path.abspath(text) for path in paths]


def file_key(path: str | os.PathLike[str]) -> str:
    """A key that is the same for every spelling of a file's path, relative or absolute; without case on Windows."""
    return os.path.normcase(os.path.abspath(path))


def folder_key(path: str | os.PathLike[str]) -> tuple[int, int, str]:
    """A key that is the same for every spelling of a folder's path, through links, and in any case where the file
    system ignores case.

    If the folder does not exist, it consists of the closest existing folder above, and the rest of the path.
    """
    try:
        existing, missing = os.path.realpath(path), ""
    except ValueError:  # a name that no folder can have
        return 0, 0, os.fspath(path)
    while not os.path.isdir(existing) and os.path.dirname(existing) != existing:
        existing, name = os.path.split(existing)
        missing = os.path.join(name, missing)
    try:
        status = os.stat(existing)
        parent, name = os.path.split(existing)
        any_case = name.swapcase() != name and os.path.samefile(os.path.join(parent, name.swapcase()), existing)
    except OSError:  # no such folder in another case
        any_case = False
    return status.st_dev, status.st_ino, missing.casefold() if any_case or os.name == "nt" else missing


def are_there(paths: Iterable[str], base: str = "") -> list[bool]:
    """Whether each path, relative to `base`, exists, by listing each folder once: on a network disk, checking every
    file is slow.

    Raises:
        UnreadableError: a folder that cannot be listed now, other than for lack of permission.
    """
    listed: dict[str, frozenset[str]] = {}
    out = []
    for path in map(os.path.normcase, paths) if os.name == "nt" else paths:
        name = path[path.rfind(os.sep) + 1 :]
        folder = path[: len(path) - len(name)]
        if folder not in listed:
            listed[folder] = frozenset()
            here = os.path.join(base, folder) or os.curdir
            # no such folder, no permission, or an impossible name
            with suppress(FileNotFoundError), reading(here), suppress(PermissionError, ValueError):
                listed[folder] = frozenset(map(os.path.normcase, os.listdir(here)))
        out.append(name in listed[folder])
    return out


_gone: dict[str, set[str]] = {}
"""By folder: files that were looked for in this process and not there."""
GONE_AT_LEAST, GONE_SHARE = 10, 0.1
"""So many files that are gone, and this share of a folder, are no fault of each file."""


def is_folder_away(path: str) -> bool:
    """Whether not this file alone is gone, as where a drive or a share is away.

    Its folder is not there, or holds no file of its kind, or a tenth of those that it held have gone.
    """
    return bool(_why_away(path))


def _why_away(path: str) -> str:
    folder, ending = os.path.dirname(path) or os.curdir, os.path.splitext(path)[1].lower()
    endings = IMAGE_EXTENSIONS if ending in IMAGE_EXTENSIONS else {ending}
    there = 0
    with suppress(OSError), os.scandir(folder) as entries:
        there = sum(is_listed(one.name) and os.path.splitext(one.name)[1].lower() in endings for one in entries)
    if not there:
        return f"{folder} is gone, or empty"
    gone = _gone.setdefault(folder, set())
    gone.add(path)
    if len(gone) >= GONE_AT_LEAST and len(gone) >= GONE_SHARE * (len(gone) + there):
        gone -= {one for one in gone if os.path.exists(one)}
        if len(gone) >= max(GONE_AT_LEAST, GONE_SHARE * (len(gone) + there)):
            return f"{len(gone)} of {len(gone) + there} files of {folder} have gone"
    return ""


def refuse_if_away(path: str, error: OSError) -> None:
    """Raise `UnreadableError` where a file that could not be read is not at fault itself.

    The error may pass; or the file is gone, or not to be read, and so is its folder, or many of its files.
    """
    if not isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
        if may_pass(error):
            with reading(path):
                raise error
    elif why := _why_away(path):
        raise UnreadableError(
            f"{why}: {os.path.basename(path)} cannot be read; bring back its drive, share or files, then run again, "
            "or resume"
        ) from error


def from_here(path: str) -> str:
    """A path for display: relative if it is in the current folder."""
    here = os.path.join(os.getcwd(), "")
    return path[len(here) :] if path.startswith(here) else path


def refuse_one_path(paths: object) -> None:
    """Raises `KohyaBucketError` for a single path instead of a list: a text would be iterated letter by letter."""
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise KohyaBucketError(
            f"paths is a single path {os.fsdecode(paths)!r}: give a list, [path]; list_images(path) lists a folder"
        )


_LISTS = (".txt", ".lst")


def list_images(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    recursive: bool = True,
    extensions: Collection[str] = IMAGE_EXTENSIONS,
) -> list[str]:
    """Paths of images, sorted within each source and without repetition.

    Args:
        source: a folder, see `is_listed`; a file; a pattern such as `data/**/*.jpg`; a `.txt` file with one path or
            URL per line (relative to its own folder, `#` begins a comment line); a URL of a folder, file or pattern
            that `fsspec` can read; or several of these.
        recursive: also look into subfolders; links to folders are followed, but never in a circle.
        extensions: endings in lower case, with the dot, that count in folders. A file that is named itself may have any
            ending.

    Raises:
        KohyaBucketError: a source does not exist, a folder cannot be listed, or a list is not UTF-8.
    """
    recursive = as_flag("recursive", recursive)
    odd = [extensions] if isinstance(extensions, str) else [e for e in extensions if not e.startswith(".")]
    if odd:
        raise KohyaBucketError(
            f"extensions holds {odd[0]!r}: give a list of endings with the dot, e.g. ['.jpg', '.png']"
        )
    if not isinstance(source, (str, os.PathLike)):
        paths = (list_images(part, recursive=recursive, extensions=extensions) for part in source)
        return list(dict.fromkeys(chain.from_iterable(paths)))
    text = os.fspath(source)
    if is_url(text):
        return list_remote(text, recursive, [e.lower() for e in extensions])
    if os.path.isdir(text):
        return sorted(_walk(text, recursive, frozenset(e.lower() for e in extensions)))
    if os.path.isfile(text):
        return _from_list(text) if text.lower().endswith(_LISTS) else [text]
    if glob.has_magic(text):
        wanted = frozenset(e.lower() for e in extensions)
        matches = matches_of(text, recursive=True)
        # A pattern with an ending is taken literally; `data/*` means the images in it.
        named = os.path.splitext(text)[1] not in ("", ".*")
        return sorted(p for p in matches if (named or os.path.splitext(p)[1].lower() in wanted) and may_be_file(p))
    raise KohyaBucketError(f"{text}: no such file or folder, and no pattern either: {path_meant(text)}")


def matches_of(pattern: str, *, recursive: bool) -> list[str]:
    """What `glob` finds. `KohyaBucketError` for a folder that cannot be listed, which it would leave out."""
    _refuse_unlisted(pattern)
    return glob.glob(pattern, recursive=recursive)


def _refuse_unlisted(pattern: str) -> None:
    folder, name = os.path.split(pattern)
    inside = pattern if name == "**" else folder or os.curdir
    while os.path.basename(folder) == "**":  # in `inside`
        folder = os.path.dirname(folder)
    if glob.has_magic(folder):
        _refuse_unlisted(folder)
    for one in glob.glob(os.path.join(inside, ""), recursive=True) if glob.has_magic(name) else ():
        try:
            os.scandir(one).close()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise KohyaBucketError(f"{one}: this folder cannot be listed ({error.strerror})") from None


def _walk(folder: str, recursive: bool, extensions: frozenset[str]) -> list[str]:
    def refuse(error: OSError) -> None:
        raise KohyaBucketError(f"{error.filename or folder}: this folder cannot be listed ({error.strerror})") from None

    out: list[str] = []
    seen: set[tuple[int, int]] = set()
    _is_new(folder, seen)
    for here, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        inner = filter(is_listed, folders) if recursive else ()
        folders[:] = [name for name in inner if _is_new(os.path.join(here, name), seen)]
        inside, listed = os.path.join(here, ""), filter(is_listed, names)
        out += [inside + name for name in listed if name[name.rfind(".") :].lower() in extensions]
    return out


def _is_new(folder: str, seen: set[tuple[int, int]]) -> bool:
    size = len(seen)
    try:
        status = os.stat(folder)
    except OSError:  # listing it will say so
        return True
    seen.add((status.st_dev, status.st_ino))
    return len(seen) > size


def _from_list(path: str) -> list[str]:
    folder = os.path.dirname(path)
    lines = map(str.strip, read_text(path, MAX_TABLE_BYTES).split("\n"))
    named = (line for line in lines if line and not line.startswith("#"))
    return list(dict.fromkeys(line if is_url(line) else os.path.join(folder, line) for line in named))
