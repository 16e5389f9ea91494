"""One clip's size, frames and rate: from its container where that can be believed, else by decoding it.

The size is that of the first decoded frame, as it is stored: a rotation that the file asks for is reported and not
done, which is how trainers read clips. A container is believed about its frames if it says how many there are and
lists each of them within the file; an edit list, a first frame that is no key frame, or a file that was cut off are
reasons to count.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from typing import Any

from kohya_bucket.images.clip_files import frames_in
from kohya_bucket.images.headers.by_pillow import pixel_limit
from kohya_bucket.images.headers.header import read_header
from kohya_bucket.images.unreadable import UnreadableImageError, explain_os_error
from kohya_bucket.texts import counted

__all__ = ["COUNTED", "MOST_FRAMES", "OF_IMAGES", "TOLD", "ClipRow", "read_clip"]

ClipRow = tuple[int, int, int, int, int, int, int]
"""(width, height, frames, numerator and denominator of frames per second, degrees by which a player turns it
counter-clockwise, how the number of frames is known)."""

TOLD, COUNTED, OF_IMAGES = 1, 2, 3
"""How the number of frames is known: the container told it, they were decoded, or they are images in a folder."""

MOST_FRAMES = 10_000_000


def read_clip(path: str, *, decode: bool = False) -> ClipRow:
    """A clip, or a folder of images that are its frames.

    Args:
        decode: decode it to the end, whatever the container says.

    Raises:
        UnreadableImageError: it cannot be decoded, or holds no frame; the text says why.
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

    path = os.path.abspath(path)  # or else what stands before a colon in its name is taken for a protocol
    seen = 0
    try:
        told = _told(path, status.st_size)
        whole = decode or not told
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
    frames = seen if whole else told
    return width, height, frames, *per_second, turn, TOLD if told == frames else COUNTED


def _video(container: Any) -> Any:
    """The stream that trainers decode, if it is one whose frames fit into memory."""
    if not container.streams.video:
        raise UnreadableImageError("holds no video")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise UnreadableImageError("holds video of a codec that is not known here")
    width, height, limit = stream.codec_context.width, stream.codec_context.height, pixel_limit()
    if limit is not None and width * height > limit:
        raise UnreadableImageError(f"{width:,}x{height:,} pixels in a frame, more than {limit:,}")
    return stream


def _rotation(frame: Any) -> int:
    """Degrees by which a player turns the frames, counter-clockwise."""
    for data in frame.side_data:
        if data.type.name == "DISPLAYMATRIX":
            x, y = struct.unpack_from("=2i", bytes(data))
            return round(-math.degrees(math.atan2(y, x))) % 360
    return 0


def _told(path: str, file_size: int) -> int:
    """How many frames the container says there are, if it can be believed; else 0."""
    import av

    with av.open(path) as container:
        stream = _video(container)
        frames = int(stream.frames)
        if not 0 < frames <= MOST_FRAMES:
            return 0
        if not hasattr(stream, "index_entries"):  # before PyAV 17: what the index says is in the packets
            return frames if _packets(container, stream) == frames else 0
        entries = stream.index_entries
        if len(entries) != frames or not entries[0].is_keyframe:
            return 0
        inside = all(e.size > 0 and not e.is_discard and e.pos + e.size <= file_size for e in entries)
        return frames if inside else 0


def _packets(container: Any, stream: Any) -> int:
    """How many packets there are, one at a time in memory; 0 if one is of no use, or the first is no key frame."""
    found = 0
    for packet in container.demux(stream):
        if packet.size:
            if packet.is_discard or packet.is_corrupt or not (found or packet.is_keyframe):
                return 0
            found += 1
    return found


def _of_images(folder: str) -> ClipRow:
    frames = frames_in(folder)
    if not frames:
        raise UnreadableImageError("a folder without images")
    try:
        width, height, _, _ = read_header(frames[0])
    except (UnreadableImageError, OSError) as error:
        name = os.path.basename(frames[0])
        raise UnreadableImageError(f"its first image, {name}: {explain_os_error(error)}") from None
    return width, height, len(frames), 0, 1, 0, OF_IMAGES
