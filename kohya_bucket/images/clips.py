"""Clips: number, size and rate of their frames.

The size is that of the first decoded frame as stored: a rotation stated in the file is reported but not applied, as in
trainers. A container's number of frames is trusted if it lists each frame within the file; after an edit list, a first
frame that is not a key frame, or a truncation, frames are counted by decoding.
"""

from __future__ import annotations

import importlib.util
import math
import os
import stat
import struct
from collections.abc import Iterable, Sequence
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
from kohya_bucket.texts import counted

TOLD, COUNTED, OF_IMAGES = 1, 2, 3
"""Source of the number of frames: the container, decoding, or images in a folder."""

MOST_FRAMES = 10_000_000
_COLUMNS = [(name, "i8") for name in ("width", "height", "frames", "rate", "per", "rotation", "source")]
ClipRow = tuple[int, int, int, int, int, int, int]
"""`_COLUMNS`; frames per second are `rate` / `per`."""


def read_clip(path: str, *, decode: bool = False) -> ClipRow:
    """Read a clip, or a folder of images that are its frames.

    Args:
        decode: decode it to the end, even if the container can be trusted.

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
        stated = _stated_frames(path, status.st_size)
        whole = decode or not stated  # else the first frame is enough: it shows that the clip can be decoded
        with av.open(path) as container:
            for frame in container.decode(_video(container)):
                seen += 1
                if seen == 1:
                    width, height, turn = frame.width, frame.height, _rotation(frame)
                if not whole or seen > MOST_FRAMES:
                    break
            rate = container.streams.video[0].average_rate
    except av.error.FFmpegError as error:
        after = f" after {counted(seen, 'frame')}" if seen else ""
        raise UnreadableImageError(f"cannot be decoded as a video{after} ({error.strerror})") from None
    if not seen:
        raise UnreadableImageError("holds no frame that can be decoded")
    if seen > MOST_FRAMES:
        raise UnreadableImageError(f"more than {MOST_FRAMES:,} frames")
    per_second = (0, 1) if rate is None else (int(rate.numerator), int(rate.denominator))
    frames = seen if whole else stated
    return width, height, frames, *per_second, turn, TOLD if stated == frames else COUNTED


def _video(container: Any) -> Any:
    """The stream that trainers decode, unless its frames are too large."""
    if not container.streams.video:
        raise UnreadableImageError("holds no video")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise UnreadableImageError("holds video of an unknown codec")
    width, height, limit = stream.codec_context.width, stream.codec_context.height, pixel_limit()
    if limit is not None and width * height > limit:
        raise UnreadableImageError(f"{width:,}x{height:,} pixels in a frame, more than {limit:,}")
    return stream


def _rotation(frame: Any) -> int:
    """Degrees by which a player turns the frames, counter-clockwise."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0
    x, y = struct.unpack_from("=2i", bytes(matrix))
    return round(-math.degrees(math.atan2(y, x))) % 360


def _stated_frames(path: str, file_size: int) -> int:
    """The container's number of frames if it can be trusted, else 0."""
    import av

    with av.open(path) as container:
        stream = _video(container)
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
    return width, height, len(frames), 0, 1, 0, OF_IMAGES


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
        failures: (index, path, reason) of each unreadable clip, by index.
    """

    paths: Sequence[str]
    sizes: npt.NDArray[np.int32]
    frames: npt.NDArray[np.int64]
    fps: npt.NDArray[np.float64]
    rotation: npt.NDArray[np.int64]
    source: npt.NDArray[np.uint8]
    failures: list[tuple[int, str, str]]

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def counted(self) -> npt.NDArray[np.bool_]:
        """[N] bool: the frames were counted, because the container does not state them or cannot be trusted."""
        return np.asarray(self.source == COUNTED)

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """[N] duration; NaN if there is no rate."""
        unknown = np.full(len(self), np.nan)
        return np.asarray(np.divide(self.frames, self.fps, out=unknown, where=self.fps > 0))


def read_clips(
    paths: Iterable[str | os.PathLike[str]],
    *,
    decode: bool = False,
    workers: int | None = None,
    engine: Engine = "auto",
    progress: Progress | None = None,
) -> ClipScan:
    """Read the size, the number and the rate of each clip's frames.

    No clip raises an error: what cannot be decoded is listed in `failures`.

    Args:
        paths: N video files, or folders of images.
        decode: decode every clip to the end, to find truncated ones; slow.
        workers: at most this many threads or processes; None: as measured, 1: this thread alone.
        engine, progress: as in `read_sizes`.

    Raises:
        KohyaBucketError: a single path instead of a list, or workers below 1; or PyAV is not installed.
    """
    refuse_one_path(paths)
    texts = [os.fspath(path) for path in paths]
    if importlib.util.find_spec("av") is None and not all(map(os.path.isdir, texts)):
        raise KohyaBucketError(f"clips are read by PyAV, which is not installed: {pip_install('video')}")
    look = partial(read_clip, decode=decode)
    job = Job(ScanTask(look, _COLUMNS), texts, workers=workers, engine=engine, progress=progress).run()
    rows = job.rows
    sizes = np.stack([rows["width"], rows["height"]], axis=1).astype(np.int32)
    rate = np.divide(rows["rate"], rows["per"], out=np.zeros(len(texts)), where=rows["per"] > 0)
    failures = [(i, texts[i], reason) for i, reason in sorted(job.failures.items())]
    return ClipScan(
        texts, sizes, rows["frames"].copy(), rate, rows["rotation"].copy(), rows["source"].astype(np.uint8), failures
    )
