"""Where images come from. A source can name the sizes of its images without decoding one.

Files on this machine are such a source. Streams and tables have cells: what a cell holds is told here, too.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

from kohya_bucket.checks import as_flag
from kohya_bucket.datasets.captions import caption_beside, warn_uncaptioned
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import MetadataCache, TextColumn, read_sizes
from kohya_bucket.images.formats import UnreadableImageError
from kohya_bucket.images.headers import header_of, read_header
from kohya_bucket.images.listing import are_there, refuse_if_away, refuse_one_path
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.pixels import NO_IMAGE, Pixels, explained, load_pixels, to_pixels
from kohya_bucket.images.remote import fetched, is_url, split_archive
from kohya_bucket.texts import is_whole

_METHODS = ("__len__", "read_sizes", "pixels", "caption", "name")


class SourceSizes(NamedTuple):
    """Sizes of all images of a source, known without decoding one.

    Attributes:
        sizes: [N, 2] int32 pixels (width, height) of what `pixels` returns; (0, 0) where unreadable.
        failures: (index, name, reason) of each unreadable image.
    """

    sizes: npt.NDArray[np.int32]
    failures: list[tuple[int, str, str]]


class ImageSource(Protocol):
    """N images with captions, addressed by number. Must be picklable for worker processes."""

    def __len__(self) -> int: ...

    def read_sizes(self) -> SourceSizes:
        """Sizes of all N images."""

    def pixels(self, index: int) -> npt.NDArray[np.uint8]:
        """One image, [H, W, 3] uint8, which may be read-only. `KohyaBucketError` if it cannot be decoded."""

    def caption(self, index: int) -> str:
        """Its caption; "" where there is none."""

    def name(self, index: int) -> str:
        """Its path, or whatever else tells which image it is, to a person, to other ranks and to a later run; for ranks
        and runs a source may have `image_names`, [N], instead."""


class CellSource(ImageSource, Protocol):
    """A source of this package: each image is in a cell, see `cell_pixels`."""

    _obey_exif: bool

    def cell(self, index: int) -> Any:
        """What holds an image. `UnreadableImageError` where nothing can be read."""

    def pixels(self, index: int) -> Pixels:
        try:
            return cell_pixels(self.cell(index), self._obey_exif)
        except UnreadableImageError as error:
            raise explained(self.name(index), error) from error


def checked_sizes(source: ImageSource) -> SourceSizes:
    """Sizes of a source that anybody may have written.

    Raises:
        KohyaBucketError: it lacks a method, or gives another number of sizes.
    """
    if missing := [name for name in _METHODS if not hasattr(source, name)]:
        raise KohyaBucketError(f"source is a {type(source).__name__} without {', '.join(missing)}: see ImageSource")
    columns = source.read_sizes()
    if (shape := np.shape(columns[0])) != (len(source), 2):
        raise KohyaBucketError(
            f"read_sizes() of {type(source).__name__} gave sizes of shape {list(shape)} for {len(source)} images, but "
            "must give one (width, height) for each"
        )
    return SourceSizes(*columns)


def at_rest(cell: Any) -> Any:
    """The cell, or an equal one that holds no file: Pillow keeps that of an image open until it is decoded.

    Such an image is read into memory as it lies in its file. Where that would not give the same one again (a later
    frame, a JPEG with a draft), or the file cannot be read again, it is decoded. What is broken stays
    as it is, and fails where it is decoded. The image itself belongs to the caller, and is not closed.
    """
    file = getattr(cell, "fp", None) if isinstance(cell, ImageFile.ImageFile) else None
    if file is None or isinstance(file, io.BytesIO):
        return cell
    try:
        return _from_memory(cell, file) or cell.copy()
    except (*NO_IMAGE, EOFError):
        return cell


def _from_memory(image: ImageFile.ImageFile, file: Any) -> Image.Image | None:
    try:
        place = file.tell()
        file.seek(0)
        encoded = file.read()
        file.seek(place)
        again = Image.open(io.BytesIO(encoded), formats=[str(image.format)])
    except (OSError, ValueError, SyntaxError, KeyError):
        return None
    same = (again.size, again.mode, again.tell()) == (image.size, image.mode, image.tell())
    return again if same else None


_CHANNELS = (1, 3, 4)


def cell_size(cell: Any, obey_exif: bool) -> tuple[int, int]:
    """(width, height) of what `cell_pixels` returns; nothing is decoded.

    Raises:
        UnreadableImageError: empty, broken, or of a shape that no image has.
    """
    if isinstance(cell, Image.Image):
        return int(cell.width), int(cell.height)
    encoded = _encoded(cell)
    if encoded is not None:
        width, height, orientation, _ = header_of(encoded) if isinstance(encoded, bytes) else read_header(encoded)
        return (height, width) if obey_exif and orientation >= 5 else (width, height)
    height, width, _ = _as_height_width(_array(cell)).shape
    return width, height


def cell_pixels(cell: Any, obey_exif: bool) -> Pixels:
    """[H, W, 3] the image in a cell; encoded ones are turned upright if `obey_exif`.

    Raises:
        UnreadableImageError: empty, broken, of a shape that no image has, or floats outside [0, 1].
        UnreadableError, StorageError: it lies where nothing can be read now.
    """
    encoded = None
    try:
        if isinstance(cell, Image.Image):
            return to_pixels(cell)
        encoded = _encoded(cell)
        if encoded is None:
            return _as_rgb(_as_height_width(_array(cell)))
        return load_pixels(fetched(encoded) if isinstance(encoded, str) else encoded, obey_exif=obey_exif)
    except KohyaBucketError:
        raise
    except NO_IMAGE as error:
        if isinstance(encoded, str) and isinstance(error, OSError) and not is_url(encoded):
            refuse_if_away(encoded, error)
        raise UnreadableImageError(str(error)) from error


_ENOUGH = 4096


def content_of(cell: Any) -> bytes | str:
    """What tells the image of a cell at rest from another, without decoding it: both ends of its file, or a corner.

    Of a cell that only says where the image lies, that is the path, which is another where the folder is.
    """
    if isinstance(cell, Image.Image):
        file = getattr(cell, "fp", None)
        if isinstance(file, io.BytesIO):
            cell = file.getvalue()
        else:
            cell = np.asarray(cell.crop((0, 0, 64, 64))) if file is None else cell.filename or str(cell.size)
    try:
        encoded = _encoded(cell)
        if encoded is None:
            encoded = np.ascontiguousarray(_as_height_width(_array(cell))[:64, :64]).tobytes()
    except UnreadableImageError as error:
        return str(error).encode()
    if isinstance(encoded, str):
        return split_archive(encoded)[0]
    return b"%d " % len(encoded) + encoded[:_ENOUGH] + encoded[-_ENOUGH:]


def _encoded(cell: Any) -> bytes | str | None:
    """A cell's encoded file, or where it lies; None for arrays. A cell may also be the reason why it has no image."""
    if isinstance(cell, UnreadableImageError):
        raise cell
    if isinstance(cell, (bytes, bytearray, memoryview)):
        return bytes(cell)
    if isinstance(cell, str):
        return cell
    if isinstance(cell, dict):
        if cell.get("bytes"):
            return bytes(cell["bytes"])
        if cell.get("path"):
            return str(cell["path"])
        raise UnreadableImageError("neither bytes nor a path in this cell")
    if cell is None:
        raise UnreadableImageError("an empty cell")
    return None


def _array(cell: Any) -> npt.NDArray[Any]:
    if hasattr(cell, "detach"):
        cell = cell.detach().cpu().numpy()
    array = np.asarray(cell)
    if array.dtype.kind not in "uifb":
        raise UnreadableImageError(f"a {type(cell).__name__} of dtype {array.dtype} is not an image")
    return array


def _as_height_width(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[H, W, C] from [H, W], [H, W, C] or [C, H, W]; the small axis is taken for the channels."""
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3:
        raise UnreadableImageError(
            f"an array of shape {list(array.shape)} is not an image: it must be [H, W], [H, W, C] or [C, H, W]"
        )
    if array.shape[2] not in _CHANNELS and array.shape[0] in _CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.shape[2] not in _CHANNELS or 0 in array.shape:
        raise UnreadableImageError(f"shape {list(array.shape)} has no axis of 1, 3 or 4 channels")
    return array


def _as_rgb(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if array.dtype.kind == "b":
        array = array.astype(np.uint8) * 255
    elif array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):
            # [-1, 1] and [0, 255] look alike often enough that guessing would spoil some images silently.
            raise UnreadableImageError(f"float pixels must lie in [0, 1], found {low:g} to {high:g}")
        array = np.rint(array * 255).astype(np.uint8)
    elif array.dtype == np.uint16:
        array = (array // 257).astype(np.uint8)
    elif array.dtype != np.uint8:
        if array.min() < 0 or array.max() > 255:
            raise UnreadableImageError(f"pixels of dtype {array.dtype} must lie in 0 to 255")
        array = array.astype(np.uint8)
    if array.shape[2] == 1:
        return np.repeat(array, 3, axis=2)
    return np.ascontiguousarray(array[..., :3])


def column_of(row: Any, column: str, name: str) -> Any:
    """What a row has in a column. `KohyaBucketError` where it has none, or is not a mapping; `name` is the row's."""
    if not isinstance(row, Mapping):
        raise KohyaBucketError(f"{name} is a {type(row).__name__}, but must be a mapping of columns")
    try:
        return row[column]
    except KeyError:
        columns = ", ".join(map(str, row))
        raise KohyaBucketError(f"{name} has no {column!r}, only {columns}: name the column that holds it") from None


class FileSource(CellSource):
    """Files, with captions from a list or from text files beside them; arguments as of `BucketedDataset`.

    Captions in files are read when the image is: of a ".json" a text, or that under "caption".

    Raises:
        KohyaBucketError: no paths, or another number of captions.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        captions: Sequence[str] | str | None = None,
        metadata_cache: MetadataCache | None = None,
        obey_exif: bool = False,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        refuse_one_path(paths)
        if metadata_cache is not None and not isinstance(metadata_cache, MetadataCache):
            raise KohyaBucketError(f"metadata_cache is {metadata_cache!r}: give MetadataCache.load(path)")
        if not isinstance(paths, TextColumn):
            must = "a text or a Path: leave out rows without a file"
            paths = TextColumn.from_texts(map(os.fspath, _all_are((str, os.PathLike), paths, "path", must)))
        self.paths = paths
        if not len(self.paths):
            raise KohyaBucketError("a dataset needs at least one image, but the list of paths is empty")
        if isinstance(captions, str) and (captions[:1] != "." or captions == "." or {"/", "\\", "\0"} & set(captions)):
            raise KohyaBucketError(
                f"captions={captions!r} is one text: give a list, or a file name ending such as '.txt'"
            )
        self._captions = captions if captions is None or isinstance(captions, str) else _texts(captions)
        if isinstance(self._captions, TextColumn) and len(self._captions) != len(self.paths):
            raise KohyaBucketError(
                f"{len(self._captions)} captions for {len(self.paths)} images: give one per image, in the same order"
            )
        if isinstance(self._captions, TextColumn):
            bare = [path for path, text in zip(self.paths, self._captions, strict=True) if not text.strip()]
            warn_uncaptioned(bare, len(self.paths))
        elif self._captions is not None:
            warn_uncaptioned(_without_captions(self.paths, self._captions), len(self.paths), f"{captions} file")
        self._obey_exif = as_flag("obey_exif", obey_exif)
        scan = read_sizes(self.paths, cached=metadata_cache, workers=workers, progress=progress)
        self._sizes = SourceSizes(scan.upright_sizes() if self._obey_exif else scan.sizes, scan.failures)

    @property
    def image_names(self) -> TextColumn:
        return self.paths

    def __len__(self) -> int:
        return len(self.paths)

    def read_sizes(self) -> SourceSizes:
        return self._sizes

    def cell(self, index: int) -> str:
        return self.paths[index]

    def caption(self, index: int) -> str:
        if isinstance(self._captions, TextColumn):
            return self._captions[index]
        return "" if self._captions is None else caption_beside(self.paths[index], self._captions) or ""

    def name(self, index: int) -> str:
        return self.paths[index]

    def __getstate__(self) -> dict[str, Any]:
        # Workers decode; sizes stay with the process that placed the images.
        return {**self.__dict__, "_sizes": None}


def _without_captions(paths: Sequence[str], ending: str) -> list[str]:
    """Images with no such file beside them."""
    paths = [path for path in paths if not is_url(path)]
    have_one = are_there(os.path.splitext(path)[0] + ending for path in paths)  # noqa: PTH122
    return [path for path, has_caption in zip(paths, have_one, strict=True) if not has_caption]


def _all_are(kind: Any, values: Iterable[Any], what: str, must: str) -> list[Any]:
    listed = list(values)
    for i, value in enumerate(listed):
        if not isinstance(value, kind):
            raise KohyaBucketError(f"{what} {i} is {value!r}, but must be {must}")
    return listed


def _texts(captions: Sequence[str]) -> TextColumn:
    if isinstance(captions, Mapping):
        raise KohyaBucketError(
            "captions is a mapping, and iterating over it gives its keys: give a list in the order of the paths, e.g. "
            "[captions[path] for path in paths]"
        )
    texts = _all_are(str, captions, "caption", 'a text; "" stands for none')
    half = next((i for i, text in enumerate(texts) if not is_whole(text)), None)
    if half is not None:
        raise KohyaBucketError(f"caption {half} is {texts[half]!r}, but must be whole characters")
    return TextColumn.from_texts(texts)
