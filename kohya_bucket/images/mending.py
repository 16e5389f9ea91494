"""What is wrong with the files of a folder of images, and what each of them becomes."""

from __future__ import annotations

import codecs
import enum
import io
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image

from kohya_bucket.checks import path_meant
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.by_pillow import ORIENTATION, TURNS, load_plugin, orientation_in
from kohya_bucket.images.focus_files import FOCUS_EXTENSIONS
from kohya_bucket.images.formats import (
    CAPTION_EXTENSIONS,
    SET_ASIDE,
    ImageFormat,
    explain_os_error,
    format_of_extension,
    not_decoded,
    sniff,
)
from kohya_bucket.images.listing import list_images
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.pixels import NO_IMAGE, load_picture
from kohya_bucket.images.sizes import read_sizes
from kohya_bucket.images.stamps import hash_file
from kohya_bucket.inputs import MAX_CAPTION_BYTES, MAX_TABLE_BYTES, open_input, read_input


class Mend(enum.Enum):
    """What is done with a file. The values are what people read."""

    TURNED = "turned as EXIF asks: sd-scripts and musubi-tuner take the pixels as they are stored"
    EIGHT_BITS = "brought from 16 bits to 8: trainers read nearly all of such grey as white"
    CONVERTED = "written as PNG: trainers list no files of this kind"
    RENAMED = "renamed by content, with an ending that trainers list"
    CAPTION = "written as UTF-8: trainers read no other text"
    BROKEN = "set aside: cannot be decoded"
    TINY = "set aside: too small to train"
    COPY = "set aside: equal to another file"


_ASIDE = (Mend.BROKEN, Mend.TINY, Mend.COPY)


@dataclass(frozen=True)
class Fix:
    """One file to fix.

    Attributes:
        path: the file.
        mends: what is done, the first of them above all.
        becomes: the path under which it is then; "" where it is set aside.
        why: what was found.
        along: captions and focus files that are set aside with it.
    """

    path: str
    mends: tuple[Mend, ...]
    becomes: str
    why: str
    along: tuple[str, ...] = ()


@dataclass
class FolderLook:
    """What a look at a folder found.

    Attributes:
        images, captions: how many files were looked at.
        fixes: in the order of the paths.
        left: (path, reason) of what should be fixed and is left as it is.
    """

    images: int = 0
    captions: int = 0
    fixes: list[Fix] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)


_BESIDE = (*CAPTION_EXTENSIONS, *FOCUS_EXTENSIONS)
_USUAL = {ImageFormat.PNG: ".png", ImageFormat.JPEG: ".jpg", ImageFormat.WEBP: ".webp", ImageFormat.BMP: ".bmp"}
_LISTED = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}  # by every trainer, in lower case or in upper case
_GREY_OF_16_BITS = b"\x10\0"  # of a PNG's header: bits of a channel, and the channels


def find(
    folder: str, *, recursive: bool = True, least_side: int = 64, encoding: str = "cp1252",
    progress: Progress | None = None,
) -> FolderLook:  # fmt: skip
    """Look at every image of a folder, and at the captions beside them. Nothing is written.

    Args:
        least_side: images with a shorter side are set aside.
        encoding: of captions that are not UTF-8 and have no byte order mark.

    Raises:
        KohyaBucketError: there is no such folder, or it cannot be listed. ScanInterrupted: Ctrl-C.
    """
    if not os.path.isdir(folder):
        raise KohyaBucketError(f"{folder}: no such folder: {path_meant(folder)}")
    paths = list_images(folder, recursive=recursive)
    scan = read_sizes(paths, verify=True, progress=progress)
    found = FolderLook(len(paths))
    unreadable, aside, taken = scan.unreadable, dict[str, Fix](), set[str]()
    for i, path in enumerate(paths):
        if i in unreadable:
            broken, why = _judge(path, unreadable[i])
            if broken:
                aside[path] = Fix(path, (Mend.BROKEN,), "", why)
            else:
                found.left.append((path, why))
        elif (side := int(scan.sizes[i].min())) < least_side:
            aside[path] = Fix(path, (Mend.TINY,), "", f"{side} pixels at its shorter side")
    sound = [path for i, path in enumerate(paths) if i not in unreadable and path not in aside]
    aside |= {path: Fix(path, (Mend.COPY,), "", f"the same as {kept}") for path, kept in _copies(sound, found)}
    stay = {os.path.splitext(path)[0] for path in paths if path not in aside}
    for i, path in enumerate(paths):
        if path in aside:
            stem = os.path.splitext(path)[0]
            along = [stem + ending for ending in _BESIDE if stem not in stay and os.path.isfile(stem + ending)]
            found.fixes.append(replace(aside[path], along=tuple(along)))
            stay.add(stem)  # of several images with one caption, the first takes it along
        elif i not in unreadable:
            fix = _mended(path, ImageFormat(scan.formats[i]), int(scan.orientation[i]))
            if fix is not None:
                _add(fix, found, taken)
    captions = dict.fromkeys(caption for path in sound for caption in _captions_of(path) if os.path.isfile(caption))
    for caption in captions.keys() - {one for fix in found.fixes for one in fix.along}:
        found.captions += 1
        _look_at_caption(caption, encoding, found)
    found.fixes.sort(key=lambda fix: fix.path)
    return found


def _judge(path: str, why: str) -> tuple[bool, str]:
    """Whether what a file holds is wrong, and what; else why it could not be read, which may pass."""
    try:
        data = read_input(path, MAX_TABLE_BYTES)
        if not load_plugin(sniff(data[:64])):
            return False, why
        load_picture(data)
    except Image.DecompressionBombError:
        return False, why
    except NO_IMAGE as error:
        passing = isinstance(error, OSError) and error.errno is not None
        if passing or isinstance(error.__context__, MemoryError):
            return False, explain_os_error(error)
        return True, not_decoded(error)
    return False, f"{why}; it could be read a moment later"


def _copies(paths: Sequence[str], found: FolderLook) -> Iterator[tuple[str, str]]:
    """(copy, kept) for files of equal content; the first that has a caption is kept, or else the first."""
    lengths: dict[int, list[str]] = defaultdict(list)
    for path in paths:
        try:
            lengths[os.stat(path).st_size].append(path)
        except OSError as error:
            found.left.append((path, explain_os_error(error)))
    for group in lengths.values():
        equal: dict[str, list[str]] = defaultdict(list)
        for path in group if len(group) > 1 else ():
            try:
                equal[hash_file(path)].append(path)
            except OSError as error:
                found.left.append((path, explain_os_error(error)))
        for same in equal.values():
            kept = next((path for path in same if any(map(os.path.isfile, _captions_of(path)))), same[0])
            yield from ((path, kept) for path in same if path != kept)


def _captions_of(path: str) -> Iterable[str]:
    return (os.path.splitext(path)[0] + ending for ending in CAPTION_EXTENSIONS)


def _mended(path: str, kind: ImageFormat, orientation: int) -> Fix | None:
    stem, ending = os.path.splitext(path)
    mends, why = list[Mend](), list[str]()
    becomes = path
    if kind not in _USUAL:
        mends.append(Mend.CONVERTED)
        why.append(kind.name)
        becomes = f"{stem}.png"
    else:
        listed = ending.lower() in _LISTED and ending in (ending.lower(), ending.upper())
        if not listed or format_of_extension(ending) is not kind:
            mends.append(Mend.RENAMED)
            why.append(f"{kind.name} in {ending}")
            becomes = stem + _USUAL[kind]
        if orientation > 1:
            mends.insert(0, Mend.TURNED)
            why.insert(0, f"EXIF orientation {orientation}")
        if kind is ImageFormat.PNG and _is_deep(path):
            mends.insert(0, Mend.EIGHT_BITS)
            why.insert(0, "16 bits of grey")
    return Fix(path, tuple(mends), becomes, ", ".join(why)) if mends else None


def _is_deep(path: str) -> bool:
    with open_input(path) as file:
        return file.read(26)[24:] == _GREY_OF_16_BITS


def _add(fix: Fix, found: FolderLook, taken: set[str]) -> None:
    """Add it, unless the name that it would get is another's."""
    if fix.becomes != fix.path:
        there = os.path.lexists(fix.becomes) and not os.path.samefile(fix.becomes, fix.path)
        if there or fix.becomes.casefold() in taken:
            name = os.path.basename(fix.becomes)
            found.left.append((fix.path, f"{fix.why}: it would become {name}, which another file is or becomes"))
            return
        taken.add(fix.becomes.casefold())
    found.fixes.append(fix)


def _look_at_caption(path: str, encoding: str, found: FolderLook) -> None:
    try:
        text, held = decoded(read_input(path, MAX_CAPTION_BYTES), encoding)
    except UnicodeError:
        found.left.append((path, f"neither UTF-8 nor {encoding}: name what it is in with --captions-in"))
    except OSError as error:
        found.left.append((path, explain_os_error(error)))
    else:
        if held != "UTF-8":
            found.fixes.append(Fix(path, (Mend.CAPTION,), path, f"{held}: {' '.join(text.split())[:60]}"))


_MARKS = {  # a mark of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32-le", codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be",
}  # fmt: skip


def decoded(data: bytes, encoding: str) -> tuple[str, str]:
    """The text of a caption file, and what it is in: by its byte order mark, UTF-8, or else `encoding`.

    Raises:
        UnicodeError: it is in none of them.
    """
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(name), f"{name.upper()} with a byte order mark"
    try:
        return data.decode("utf-8"), "UTF-8"
    except UnicodeDecodeError:
        return data.decode(encoding), encoding


def content_of(fix: Fix, encoding: str) -> bytes | None:
    """What a fixed file holds; None where it stays as it is and only its name or place changes.

    Raises:
        KohyaBucketError: it cannot be made. OSError: the file cannot be read now.
    """
    if fix.mends[0] is Mend.CAPTION:
        return decoded(read_input(fix.path, MAX_CAPTION_BYTES), encoding)[0].encode("utf-8")
    if fix.mends[0] in _ASIDE or fix.mends == (Mend.RENAMED,):
        return None
    kind = format_of_extension(os.path.splitext(fix.becomes)[1])
    try:
        with open_input(fix.path) as file, Image.open(file) as image:
            image.load()
            content, size = _encoded(image, kind)
        with Image.open(io.BytesIO(content)) as made:
            made.load()
            good = made.size == size and orientation_in(made) == 1
    except NO_IMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise KohyaBucketError(f"{fix.path}: cannot be written again ({not_decoded(error)})") from error
    if not good:
        raise KohyaBucketError(f"{fix.path}: what was made of it is not {size[0]}x{size[1]}, upright")
    return content


def _encoded(image: Image.Image, kind: ImageFormat) -> tuple[bytes, tuple[int, int]]:
    """An image upright, in one frame of 8 bits, and its size. Only JPEG lose a little: a level or two of 255."""
    exif, turn = image.getexif(), TURNS.get(orientation_in(image))
    options = {"icc_profile": image.info.get("icc_profile")}
    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("numbers with a point: what is black and white in them is not known")
    if turn is not None:
        image = image.transpose(turn)
    exif.pop(ORIENTATION, None)
    if len(exif):
        options["exif"] = exif.tobytes()
    if kind is ImageFormat.JPEG:
        options |= {"quality": 95, "subsampling": 0}
    elif kind is ImageFormat.WEBP:
        options |= {"lossless": True, "exact": True}
    elif image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
        options.pop("icc_profile")  # of other colours
    out = io.BytesIO()
    image.save(out, kind.name, **{name: value for name, value in options.items() if value is not None})
    return out.getvalue(), image.size


def beside(folder: str) -> Path:
    """Where the files of a folder are set aside, beside it: trainers take no such name for one of theirs."""
    path = Path(os.path.abspath(folder))
    return path.with_name(SET_ASIDE + path.name)
