"""Clips of given sizes, lengths and rates, where their pictures do not matter."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

CODECS = {
    ".mp4": "libx264", ".mov": "libx264", ".m4v": "mpeg4", ".mkv": "libx264", ".webm": "libvpx-vp9", ".avi": "mpeg4",
    ".flv": "flv1", ".wmv": "wmv2", ".mpg": "mpeg2video", ".mpeg": "mpeg2video",
}  # fmt: skip
"""A codec of each container, by the ending of its files."""


def make_clip(
    path: Path, frames: int = 25, size: tuple[int, int] = (64, 48), fps: Any = 24, *, rotation: int = 0,
    options: dict[str, str] | None = None, key_every: int | None = None,
) -> Path:  # fmt: skip
    """A clip of grey frames, each of another grey."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=options or {}) as container:
        stream: Any = container.add_stream(CODECS[path.suffix.lower()], rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        if key_every:
            stream.codec_context.gop_size = key_every
        if rotation:
            stream.set_display_rotation(rotation)
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), i * 5 % 255, np.uint8), format="rgb24")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def copy_packets(source: Path, target: Path, first: int = 0, shift: int = 0) -> Path:
    """A cut without encoding: the packets from the `first` on, with so many frames added to their times."""
    import av

    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        stream = old.streams.video[0]
        out = new.add_stream_from_template(stream)
        step = round(1 / (stream.average_rate * stream.time_base))
        for number, packet in enumerate(p for p in old.demux(stream) if p.size):
            if number >= first:
                packet.pts, packet.dts = packet.pts + shift * step, packet.dts + shift * step
                packet.stream = out
                new.mux(packet)
    return target


def with_cover(path: Path, clip: Path) -> Path:
    """The packets of a clip behind another video stream, of one picture of 32x32."""
    import av

    with av.open(str(clip)) as old, av.open(str(path), "w") as new:
        cover: Any = new.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 32, 32, "yuvj420p"
        out = new.add_stream_from_template(old.streams.video[0])
        new.mux(cover.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        new.mux(cover.encode())
        for packet in old.demux(old.streams.video[0]):
            if packet.size:
                packet.stream = out
                new.mux(packet)
    return path


def decoded(path: Path) -> int:
    """How many frames a decoder gives."""
    import av

    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))
