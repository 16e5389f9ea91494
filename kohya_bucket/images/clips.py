"""Clips: number, size and rate of their frames.

The size is that of the first decoded frame as stored: a rotation stated in the file is reported but not applied, as in
trainers. A container's number of frames is trusted if it lists each frame within the file; after an edit list, a first
frame that is not a key frame, or a truncation, frames are counted by decoding. What a decoder gives of a file that was
cut off may look whole, so the lengths that the container states are compared with the file's.
"""

from __future__ import annotations

import importlib.util
import math
import os
import stat
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import pip_install
from kohya_bucket.images.by_pillow import pixel_limit
from kohya_bucket.images.formats import UnreadableImageError, explain_os_error, frame_endings, is_listed
from kohya_bucket.images.headers import read_header
from kohya_bucket.images.listing import refuse_one_path
from kohya_bucket.images.parallel import Engine, Progress
from kohya_bucket.images.scan import Job, ScanTask
from kohya_bucket.inputs import open_input
from kohya_bucket.texts import counted

TOLD, COUNTED, OF_IMAGES = 1, 2, 3
"""Source of the number of frames: the container, decoding, or images in a folder."""

MOST_FRAMES = 10_000_000
_NAMES = ("width", "height", "frames", "rate", "per", "rotation", "source", "missing", "behind")
_COLUMNS = [(name, "i8") for name in _NAMES]
ClipRow = tuple[int, int, int, int, int, int, int, int, int]
"""`_COLUMNS`; frames per second are `rate` / `per`."""


def read_clip(path: str, *, decode: bool = False, first: bool = False) -> ClipRow:
    """Read a clip, or a folder of images that are its frames.

    Args:
        decode, first: as in `read_clips`.

    Raises:
        UnreadableImageError: it cannot be decoded, or has no frame; the text says why.
        OSError: the file cannot be opened.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        return _of_images(path)
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableImageError("not a regular file")
    if not status.st_size:
        raise UnreadableImageError("an empty file (0 bytes)")
    import av

    path = os.path.abspath(path)  # else a colon in its name would end a protocol
    seen = 0
    try:
        missing = missing_bytes(path, status.st_size)
        stated = _stated_frames(path, status.st_size, first)
        whole = decode or not stated  # else the first frame is enough: it shows that the clip can be decoded
        with av.open(path) as container:
            stream = _video(container, first)
            for frame in container.decode(stream):
                seen += 1
                if seen == 1:
                    width, height, turn = frame.width, frame.height, _rotation(frame)
                if not whole or seen > MOST_FRAMES:
                    break
            rate, behind = stream.average_rate, _plays(container) != container.streams.video[0]
    except av.error.FFmpegError as error:
        after = f" after {counted(seen, 'frame')}" if seen else ""
        raise UnreadableImageError(f"cannot be decoded as a video{after} ({error.strerror})") from None
    if not seen:
        raise UnreadableImageError("holds no frame that can be decoded")
    if seen > MOST_FRAMES:
        raise UnreadableImageError(f"more than {MOST_FRAMES:,} frames")
    per_second = (0, 1) if rate is None else (int(rate.numerator), int(rate.denominator))
    frames = seen if whole else stated
    source = TOLD if stated == frames else COUNTED
    return width, height, frames, *per_second, turn, source, missing, int(behind)


def _plays(container: Any) -> Any:
    """The video stream that a player shows: a file may begin with its cover picture."""
    return container.streams.best("video") or container.streams.video[0]


def _video(container: Any, first: bool) -> Any:
    """The stream to decode, unless its frames are too large."""
    if not container.streams.video:
        raise UnreadableImageError("holds no video")
    stream = container.streams.video[0] if first else _plays(container)
    if stream.codec_context is None:
        raise UnreadableImageError("holds video of an unknown codec")
    width, height, limit = stream.codec_context.width, stream.codec_context.height, pixel_limit()
    if limit is not None and width * height > limit:
        raise UnreadableImageError(f"{width:,}x{height:,} pixels in a frame, more than {limit:,}")
    stream.codec_context.thread_count = 1  # FFmpeg 7.1.0, of PyAV 14.0 to 14.2, hangs in HEVC on several
    return stream


def _rotation(frame: Any) -> int:
    """Degrees by which a player turns the frames, counter-clockwise."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0
    x, y = struct.unpack_from("=2i", bytes(matrix))
    return round(-math.degrees(math.atan2(y, x))) % 360


def _mp4_box(head: bytes) -> int:
    length, kind, long = struct.unpack_from(">I4sQ", head)
    return int(long if length == 1 else length) if kind.isalnum() else 0


def _riff_chunk(head: bytes) -> int:
    length = int.from_bytes(head[4:8], "little")
    return 8 + length + length % 2 if head[:4] == b"RIFF" and 0 < length < 0xFFFFFFFF else 0


def _asf_object(head: bytes) -> int:
    return int.from_bytes(head[16:24], "little")


def _ebml_element(head: bytes) -> int:
    """Of the first level: the header, and the segment that holds all else."""
    if head[:4] not in (_EBML, b"\x18\x53\x80\x67"):
        return 0
    width = 9 - head[4].bit_length()
    length = int.from_bytes(head[4 : 4 + width], "big") - (1 << 7 * width)
    return 4 + width + length if width < 9 and length != (1 << 7 * width) - 1 else 0  # all ones: unknown


def _flv_tag(head: bytes) -> int:
    if head[:3] == b"FLV":
        return 13
    return 15 + int.from_bytes(head[1:4], "big") if head[0] in (8, 9, 18) else 0


def _mpeg_packet(head: bytes) -> int:
    if head[:4] == _MPEG:
        return 14 + head[13] % 8 if head[4] >> 6 == 1 else 12
    length = int.from_bytes(head[4:6], "big")
    return 6 + length if head[:3] == _MPEG[:3] and head[3] > 0xBA and length else 0


_EBML, _MPEG, _HEAD = b"\x1a\x45\xdf\xa3", b"\x00\x00\x01\xba", 24
_PARTS: Sequence[tuple[bytes, int, Callable[[bytes], int]]] = (
    (_EBML, 0, _ebml_element),
    (b"RIFF", 0, _riff_chunk),
    (bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"), 0, _asf_object),
    (b"FLV", 0, _flv_tag),
    (_MPEG, 0, _mpeg_packet),
    *((kind, 4, _mp4_box) for kind in (b"ftyp", b"moov", b"mdat")),
)
"""How files of a container begin, where, and what tells the length of a part by its first bytes; 0: not stated."""


def missing_bytes(path: str, file_size: int) -> int:
    """How many bytes at least a container states and a file has not, because it was cut off; 0 if none are known."""
    at = 0
    with open_input(path) as file:
        head = file.read(_HEAD)
        length_of = next((of for magic, start, of in _PARTS if head.startswith(magic, start)), lambda _: 0)
        for _ in range(MOST_FRAMES):
            length = length_of(head.ljust(_HEAD, b"\0"))
            at += length
            if not length or at >= file_size:
                break
            file.seek(at)
            head = file.read(_HEAD)
    return max(0, at - file_size)


def _stated_frames(path: str, file_size: int, first: bool) -> int:
    """The container's number of frames if it can be trusted, else 0."""
    import av

    with av.open(path) as container:
        stream = _video(container, first)
        frames = int(stream.frames)
        if not 0 < frames <= MOST_FRAMES:
            return 0
        if not hasattr(stream, "index_entries"):  # before PyAV 17 only packets show the index
            return frames if _packets(container, stream) == frames else 0
        entries = stream.index_entries
        if len(entries) != frames or not entries[0].is_keyframe:
            return 0
        inside = all(e.size > 0 and not e.is_discard and e.pos + e.size <= file_size for e in entries)
        return frames if inside else 0


def _packets(container: Any, stream: Any) -> int:
    """Number of packets, read one at a time; 0 if one is unusable or the first is not a key frame."""
    count = 0
    for packet in container.demux(stream):
        if packet.size:
            if packet.is_discard or packet.is_corrupt or not (count or packet.is_keyframe):
                return 0
            count += 1
    return count


def _of_images(folder: str) -> ClipRow:
    # As in musubi-tuner a folder with such a name counts too, and cannot be read.
    frames = [name for name in filter(is_listed, os.listdir(folder)) if os.path.splitext(name)[1] in frame_endings()]
    if not frames:
        raise UnreadableImageError("a folder without images")
    first = min(frames)
    try:
        width, height, _, _ = read_header(os.path.join(folder, first))
    except (UnreadableImageError, OSError) as error:
        raise UnreadableImageError(f"its first image, {first}: {explain_os_error(error)}") from None
    return width, height, len(frames), 0, 1, 0, OF_IMAGES, 0, 0


@dataclass(frozen=True)
class ClipScan:
    """N clips; row i belongs to the i-th path.

    Attributes:
        paths: the N paths, as text.
        sizes: [N, 2] int32 pixels (width, height) of a frame as stored, unrotated; (0, 0) where unreadable.
        frames: [N] int64; 0 where unreadable.
        fps: [N] float64 average frames per second; 0 if there is no rate, as for a folder of images.
        rotation: [N] int64 degrees by which a player turns the frames, counter-clockwise.
        source: [N] uint8 source of `frames`: `TOLD`, `COUNTED` or `OF_IMAGES`; 0 where unreadable.
        missing: [N] int64 bytes, at least, that were cut off: `frames` counts what is left.
        behind: [N] bool: the stream that plays is not the file's first, which trainers decode, e.g. a cover picture.
        failures: (index, path, reason) of each unreadable clip, by index.
    """

    paths: Sequence[str]
    sizes: npt.NDArray[np.int32]
    frames: npt.NDArray[np.int64]
    fps: npt.NDArray[np.float64]
    rotation: npt.NDArray[np.int64]
    source: npt.NDArray[np.uint8]
    missing: npt.NDArray[np.int64]
    behind: npt.NDArray[np.bool_]
    failures: list[tuple[int, str, str]]

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def counted(self) -> npt.NDArray[np.bool_]:
        """[N] bool: the frames were counted, because the container does not state them or cannot be trusted."""
        return np.asarray(self.source == COUNTED)

    @property
    def flaws(self) -> Mapping[int, str]:
        """Index -> what is wrong with a clip that can be read, for a reader."""
        cut = {i: f"breaks off after {counted(int(self.frames[i]), 'frame')}, at least {int(self.missing[i]):,} bytes "
               "are missing" for i in np.flatnonzero(self.missing).tolist()}  # fmt: skip
        behind = "its first video stream, which trainers decode, is not the one that plays"
        return cut | dict.fromkeys(np.flatnonzero(self.behind).tolist(), behind)

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """[N] duration; NaN if there is no rate."""
        unknown = np.full(len(self), np.nan)
        return np.asarray(np.divide(self.frames, self.fps, out=unknown, where=self.fps > 0))


def read_clips(
    paths: Iterable[str | os.PathLike[str]],
    *,
    decode: bool = False,
    first: bool = False,
    workers: int | None = None,
    engine: Engine = "auto",
    progress: Progress | None = None,
) -> ClipScan:
    """Read the size, the number and the rate of each clip's frames.

    No clip raises an error: what cannot be decoded is listed in `failures`.

    Args:
        paths: N video files, or folders of images.
        decode: decode every clip to the end, to find damaged ones; slow.
        first: of a file with several video streams read the first, as trainers do, and not the one that plays.
        workers: at most this many threads or processes; None: as measured, 1: this thread alone.
        engine, progress: as in `read_sizes`.

    Raises:
        KohyaBucketError: a single path instead of a list, or workers below 1; or PyAV is not installed.
    """
    refuse_one_path(paths)
    texts = [os.fspath(path) for path in paths]
    if importlib.util.find_spec("av") is None and not all(map(os.path.isdir, texts)):
        raise KohyaBucketError(f"clips are read by PyAV, which is not installed: {pip_install('video')}")
    look = partial(read_clip, decode=decode, first=first)
    job = Job(ScanTask(look, _COLUMNS), texts, workers=workers, engine=engine, progress=progress).run()
    rows = job.rows
    sizes = np.stack([rows["width"], rows["height"]], axis=1).astype(np.int32)
    rate = np.divide(rows["rate"], rows["per"], out=np.zeros(len(texts)), where=rows["per"] > 0)
    failures = [(i, texts[i], reason) for i, reason in sorted(job.failures.items())]
    return ClipScan(
        texts, sizes, rows["frames"].copy(), rate, rows["rotation"].copy(), rows["source"].astype(np.uint8),
        rows["missing"].copy(), rows["behind"] > 0, failures,
    )  # fmt: skip
