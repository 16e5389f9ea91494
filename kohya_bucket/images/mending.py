"""What is wrong with the files in a folder of images, and how each can be fixed."""

from __future__ import annotations

import codecs
import enum
import io
import os
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO

import numpy as np
from PIL import Image

from kohya_bucket.checks import path_meant
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.by_pillow import ORIENTATION, PNG_HEADER, TURNS, chunks_of_png, load_plugin, orientation_in
from kohya_bucket.images.code_pages import WESTERN, is_western, readings
from kohya_bucket.images.focus_files import FOCUS_EXTENSIONS
from kohya_bucket.images.formats import (
    CAPTION_EXTENSIONS,
    ImageFormat,
    explain_os_error,
    format_of_extension,
    not_decoded,
    not_loaded,
    sniff,
)
from kohya_bucket.images.listing import are_there, list_images
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.pixels import NO_IMAGE, load_pixels
from kohya_bucket.images.sizes import SizeScan, read_sizes
from kohya_bucket.images.stamps import Stamp, hash_file
from kohya_bucket.inputs import MAX_CAPTION_BYTES, MAX_TABLE_BYTES, open_input, read_input


class Mend(enum.Enum):
    """What is done with a file. The values are for the user."""

    TURNED = "turned as EXIF asks: sd-scripts and musubi-tuner take the pixels as they are stored"
    EIGHT_BITS = "brought from 16 bits to 8: trainers read nearly all of such grey as white"
    CONVERTED = "written as PNG: trainers list no files of this kind"
    RENAMED = "renamed by content, with an ending that trainers list"
    CAPTION = "written as UTF-8: trainers read no other text"
    BROKEN = "set aside: cannot be decoded"
    TINY = "set aside: too small to train"
    COPY = "set aside: equal to another file"
    ALONG = "set aside with its image"


_ASIDE = (Mend.BROKEN, Mend.TINY, Mend.COPY, Mend.ALONG)


@dataclass(frozen=True)
class Fix:
    """One file to fix.

    Attributes:
        path: the file.
        mends: what is done, the most important first.
        becomes: its path afterwards; "" if it is set aside.
        why: what is wrong with it.
        beside: for a copy the file that it equals, for a caption its image.
        stamp: of the file before it was examined.
    """

    path: str
    mends: tuple[Mend, ...]
    becomes: str
    why: str
    beside: str = ""
    stamp: Stamp = (0, 0)


@dataclass
class FolderLook:
    """The result of examining a folder.

    Attributes:
        images, captions: number of files examined.
        fixes: in the order in which they must be made: copies first, while the file that they equal is unchanged;
            captions after their images.
        left: (path, reason) of files that should be fixed, but are left unchanged.
    """

    images: int = 0
    captions: int = 0
    fixes: list[Fix] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)


_BESIDE = (*CAPTION_EXTENSIONS, *FOCUS_EXTENSIONS)
_USUAL = {ImageFormat.PNG: ".png", ImageFormat.JPEG: ".jpg", ImageFormat.WEBP: ".webp", ImageFormat.BMP: ".bmp"}
_LISTED = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}  # by every trainer, in lower or upper case
_GREY_OF_16_BITS = b"\x10\0"  # in a PNG's header: bits per channel, and colour type


def find(
    folder: str,
    *,
    recursive: bool = True,
    least_side: int = 64,
    encoding: str | None = None,
    progress: Progress | None = None,
) -> FolderLook:
    """Examine every image of a folder, and the captions beside them. Nothing is written.

    Args:
        least_side: images with a shorter side are set aside.
        encoding: of captions that are not UTF-8 and have no byte order mark; None: cp1252 where they can be nothing
            else, and else they are left.

    Raises:
        KohyaBucketError: there is no such folder, or it cannot be listed. ScanInterrupted: Ctrl-C.
    """
    if not os.path.isdir(folder):
        raise KohyaBucketError(f"{folder}: no such folder: {path_meant(folder)}")
    paths = list_images(folder, recursive=recursive)
    look = _Looking(folder, paths)
    scan = read_sizes(paths, verify=True, progress=progress)
    # What is set aside first: broken and tiny images, then copies among the usable ones.
    usable = _without_unusable(look, scan, least_side)
    for path, original in _copies([paths[i] for i in usable], look.links, look.result):
        look.add(Fix(path, (Mend.COPY,), "", f"the same as {original}", original))
    # What is fixed in place or under a new name: the images that stay.
    for i in usable:
        if paths[i] not in look.aside:
            try:
                look.add(_fix_of(paths[i], ImageFormat(scan.formats[i]), int(scan.orientation[i])))
            except OSError as error:
                look.result.left.append((paths[i], explain_os_error(error)))
    # Texts follow images that are set aside; captions of the others are checked for their encoding.
    _take_texts_along(look, paths)
    _check_captions(look, dict.fromkeys(text for i in usable for text in _captions_of(paths[i])), encoding)
    look.result.fixes.sort(key=lambda fix: (Mend.COPY not in fix.mends, Mend.ALONG in fix.mends, fix.path))
    return look.result


class _Looking:
    """An examination in progress, which knows which files may be changed, and to which names.

    Attributes:
        aside: files to be set aside.
        texts: captions and focus files beside the images.
        links: files that are links, or behind one, and their targets.
        stamps: of all other files.
    """

    def __init__(self, folder: str, paths: Sequence[str]) -> None:
        root, beside = os.path.realpath(folder), [os.path.splitext(path)[0] + end for path in paths for end in _BESIDE]
        self.result, self.aside = FolderLook(len(paths)), set[str]()
        self.texts = {text for text, is_there in zip(beside, are_there(beside), strict=True) if is_there}
        self._device, self._paths, self._new_names = os.stat(root).st_dev, set(paths), set[str]()
        self.links, self.stamps = dict[str, str](), dict[str, Stamp]()
        for path in (*paths, *self.texts):
            real = os.path.realpath(path)
            if real != os.path.join(root, os.path.relpath(path, folder)):
                self.links[path] = real
            else:
                with suppress(OSError):
                    self.stamps[path] = stamp_of_plain(path)
        self._link_to = {real: link for link, real in self.links.items()}

    def add(self, fix: Fix | None) -> None:
        """Add a fix, or record why its file is left unchanged."""
        if fix is None:
            return
        if why := self._why_left(fix.path, fix.becomes):
            self.result.left.append((fix.path, f"{fix.why}: {why}"))
            return
        self.result.fixes.append(replace(fix, stamp=self.stamps[fix.path]))
        if not fix.becomes:
            self.aside.add(fix.path)

    def _why_left(self, path: str, becomes: str) -> str:
        """Why a file must not be changed; "" if it may: then the name `becomes` is reserved."""
        if path in self.links:
            return f"it is a link, or behind one, to {self.links[path]}: fix that"
        if path not in self.stamps or not os.path.lexists(path):
            return "it is gone, or not a regular file"
        if os.lstat(path).st_dev != self._device:
            return "it lies on another disk than the folder: fix its own folder"
        if becomes == path:
            return ""
        if link := self._link_to.get(os.path.realpath(path)):
            return f"{link} is a link to it"
        name = becomes.casefold()
        is_taken = bool(becomes) and name != path.casefold() and os.path.lexists(becomes)
        if is_taken or becomes in self._paths or name in self._new_names:
            return f"it would become {os.path.basename(becomes)}, which another file is or becomes: rename it yourself"
        self._new_names.update({name} - {""})
        return ""


def _without_unusable(look: _Looking, scan: SizeScan, least_side: int) -> list[int]:
    """The usable images; broken and tiny ones are set aside."""
    unreadable, usable = scan.unreadable, list[int]()
    for i, path in enumerate(scan.paths):
        if i in unreadable:
            broken, why = _judge(path, unreadable[i])
            if broken:
                look.add(Fix(path, (Mend.BROKEN,), "", why))
            else:
                look.result.left.append((path, why))
        elif (side := int(scan.sizes[i].min())) < least_side:
            look.add(Fix(path, (Mend.TINY,), "", f"{side} pixels at its shorter side"))
        else:
            usable.append(i)
    return usable


def _take_texts_along(look: _Looking, paths: Sequence[str]) -> None:
    """Set the texts of images aside that are set aside, unless another image of that name stays."""
    staying = {os.path.splitext(path)[0] for path in paths if path not in look.aside}
    for path in sorted(look.aside):
        stem = os.path.splitext(path)[0]
        for text in (stem + ending for ending in _BESIDE if stem not in staying and stem + ending in look.texts):
            look.add(Fix(text, (Mend.ALONG,), "", f"of {os.path.basename(path)}", path))
        staying.add(stem)  # of several images with one caption, the first takes it along


def stamp_of_plain(path: str | os.PathLike[str]) -> Stamp:
    """The stamp of a file. `OSError` if it is missing, a link, or not a regular file."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    return status.st_size, status.st_mtime_ns


def _judge(path: str, why: str) -> tuple[bool, str]:
    """(True, problem) if a file's content is broken; (False, reason) if it could not be read, perhaps only now."""
    try:
        data = read_input(path, MAX_TABLE_BYTES)
        if not load_plugin(sniff(data[:64])):
            return False, why
        load_pixels(data)
    except Image.DecompressionBombError:
        return False, why
    except NO_IMAGE as error:
        is_temporary = isinstance(error, OSError) and error.errno is not None
        if is_temporary or isinstance(error.__context__, MemoryError):
            return False, explain_os_error(error)
        return True, not_decoded(error)
    return False, f"{why}; it could be read a moment later"


def _copies(paths: Sequence[str], links: Collection[str], look: FolderLook) -> Iterator[tuple[str, str]]:
    """(copy, original) of files with equal content. The original is rather no link, then has a caption, then the
    shortest name: that of a copy is longer.
    """
    lengths: dict[int, list[str]] = defaultdict(list)
    for path in paths:
        try:
            lengths[os.stat(path).st_size].append(path)
        except OSError as error:
            look.left.append((path, explain_os_error(error)))
    for group in lengths.values():
        equal: dict[str, list[str]] = defaultdict(list)
        for path in group if len(group) > 1 else ():
            try:
                equal[hash_file(path)].append(path)
            except OSError as error:
                look.left.append((path, explain_os_error(error)))
        for same in equal.values():
            original = min(same, key=lambda path: (path in links, not _has_caption(path), len(os.path.basename(path))))
            yield from ((path, original) for path in same if path != original)


def _has_caption(path: str) -> bool:
    return any(map(os.path.isfile, _captions_of(path)))


def _captions_of(path: str) -> Iterable[str]:
    return (os.path.splitext(path)[0] + ending for ending in CAPTION_EXTENSIONS)


def _fix_of(path: str, kind: ImageFormat, orientation: int) -> Fix | None:
    stem, ending = os.path.splitext(path)
    mends, why = list[Mend](), list[str]()
    becomes = path
    if kind not in _USUAL:
        mends.append(Mend.CONVERTED)
        why.append(kind.name)
        becomes = f"{stem}.png"
    else:
        if kind is ImageFormat.PNG and _is_deep(path):
            mends.append(Mend.EIGHT_BITS)
            why.append("16 bits of grey")
        if orientation > 1:
            mends.append(Mend.TURNED)
            why.append(f"EXIF orientation {orientation}")
        listed = ending.lower() in _LISTED and ending in (ending.lower(), ending.upper())
        if not listed or format_of_extension(ending) is not kind:
            mends.append(Mend.RENAMED)
            why.append(f"{kind.name} in {ending}")
            becomes = stem + _USUAL[kind]
    return Fix(path, tuple(mends), becomes, ", ".join(why)) if mends else None


def _is_deep(path: str) -> bool:
    with open_input(path) as file:
        return file.read(26)[24:] == _GREY_OF_16_BITS


def _check_captions(look: _Looking, captions: Iterable[str], encoding: str | None) -> None:
    unknown: dict[str, bytes] = {}  # what is neither UTF-8 nor marked, while no encoding is named
    for path in captions:
        if path not in look.texts or path in look.aside:
            continue
        look.result.captions += 1
        try:
            data = read_input(path, MAX_CAPTION_BYTES)
            _add_caption(look, path, *decoded(data, encoding))
        except UnicodeError:
            if encoding is None:
                unknown[path] = data
            else:
                look.result.left.append((path, f"neither UTF-8 nor {encoding}: name its encoding with --captions-in"))
        except OSError as error:
            look.result.left.append((path, explain_os_error(error)))
    likely = {path: readings(data) for path, data in unknown.items()}
    western = is_western(data for path, data in unknown.items() if likely[path])
    for path, data in unknown.items():
        if not likely[path]:
            look.result.left.append((path, "in no usual code page a text: name its encoding with --captions-in"))
        elif western:
            _add_caption(look, path, data.decode(WESTERN), WESTERN)
        else:
            texts = " or ".join(f"{text!r} in {page}" for page, text in likely[path])
            name = f"name it, as in --captions-in {likely[path][0][0]}"
            look.result.left.append((path, f"not UTF-8, and no code page is guessed ({texts}): {name}"))


def _add_caption(look: _Looking, path: str, text: str, encoding: str) -> None:
    if encoding != "UTF-8":
        look.add(Fix(path, (Mend.CAPTION,), path, f"{encoding}: {' '.join(text.split())[:60]}"))


_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16, whose marks its own begin with
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def decoded(data: bytes, encoding: str | None) -> tuple[str, str]:
    """The text of a caption file and its encoding: by its byte order mark, UTF-8, or else `encoding`, if one is known.

    Raises:
        UnicodeError: it has none of these encodings.
    """
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(name), f"{name.upper()} with a byte order mark"
    try:
        return data.decode("utf-8"), "UTF-8"
    except UnicodeDecodeError:
        if encoding is None:
            raise
        return data.decode(encoding), encoding


def content_of(fix: Fix, encoding: str) -> bytes | None:
    """The content of a fixed file; None if only its name or place changes.

    Raises:
        KohyaBucketError: it cannot be made, or a copy no longer equals its original. OSError: the file cannot be read
            now.
    """
    # A caption, a copy or what is set aside has no other mend; only images have several.
    if fix.mends[0] is Mend.CAPTION:
        try:
            return decoded(read_input(fix.path, MAX_CAPTION_BYTES), encoding)[0].encode("utf-8")
        except UnicodeError as error:
            raise KohyaBucketError(f"can no longer be read as text ({error})") from None
    if fix.mends[0] is Mend.COPY and hash_file(fix.path) != hash_file(fix.beside):
        raise KohyaBucketError(f"{fix.beside} is no longer equal")
    if fix.mends[0] in _ASIDE or fix.mends == (Mend.RENAMED,):
        return None
    kind = format_of_extension(os.path.splitext(fix.becomes)[1])
    try:
        with open_input(fix.path) as file, Image.open(file) as image:
            image.load()
            content, size = _encoded(image, kind)
            if kind is ImageFormat.PNG and image.format == "PNG":
                content = _with_texts_of(file, content)
        with Image.open(io.BytesIO(content)) as made:
            made.load()
            is_right = made.size == size and orientation_in(made) == 1
    except KohyaBucketError:
        raise
    except NO_IMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise KohyaBucketError(f"cannot be written again ({not_decoded(error)})") from error
    if not is_right:
        raise KohyaBucketError(f"the new image is not {size[0]}x{size[1]} and upright")
    return content


def _with_texts_of(file: BinaryIO, content: bytes) -> bytes:
    """A new PNG with the texts of the old one, such as the prompt of a generated image."""
    texts = list[bytes]()
    for name, at, length in chunks_of_png(file):
        if name in (b"tEXt", b"zTXt", b"iTXt"):
            file.seek(at)
            text = file.read(length)
            texts += [text] if not text[8:].startswith(_TURNING_TEXTS) else []
    return content[:PNG_HEADER] + b"".join(texts) + content[PNG_HEADER:]


_TURNING_TEXTS = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0", b"Raw profile type APP1\0")


@contextmanager
def _keeping_exif() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Pillow raises anything for damaged blocks, and values of other types than tags have
        why = f"its EXIF cannot be written again ({not_loaded(error)})"
        raise KohyaBucketError(f"{why}: take it, or its damaged tags, out of the file first") from error


def _encoded(image: Image.Image, kind: ImageFormat) -> tuple[bytes, tuple[int, int]]:
    """An upright image of one 8-bit frame, and its size. Only JPEG lose anything: a level or two of 255."""
    with _keeping_exif():
        exif = image.getexif()
    turn = TURNS.get(orientation_in(image))
    options = {"icc_profile": image.info.get("icc_profile")}
    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floats without a known range")
    if turn is not None:
        image = image.transpose(turn)
    exif.pop(ORIENTATION, None)
    if len(exif):
        with _keeping_exif():
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
