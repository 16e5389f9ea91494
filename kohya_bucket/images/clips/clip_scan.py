"""Sizes, frames and rates of many clips."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import pip_install
from kohya_bucket.images.clip_files import VIDEO_EXTENSIONS
from kohya_bucket.images.files.listing import list_images
from kohya_bucket.images.files.paths import refuse_one_path
from kohya_bucket.images.headers.clip import COUNTED
from kohya_bucket.images.progress import Progress
from kohya_bucket.images.scan.pool import Engine, Job

__all__ = ["ClipScan", "list_clips", "read_clips"]


@dataclass(frozen=True)
class ClipScan:
    """What is known of N clips; row i belongs to the i-th path.

    Attributes:
        paths: the N paths, as text.
        sizes: [N, 2] int32 pixels (width, height) of a frame as stored, unrotated; (0, 0) where unreadable.
        frames: [N] int64; 0 where unreadable.
        fps: [N] float64 frames per second on average; 0 where the file has none, as a folder of images.
        rotation: [N] int64 degrees by which a player turns the frames, counter-clockwise.
        source: [N] uint8 how `frames` is known: `TOLD`, `COUNTED` or `OF_IMAGES`; 0 where unreadable.
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
        """[N] bool: the frames were counted, because the container does not say or cannot be believed."""
        return np.asarray(self.source == COUNTED)

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """[N] how long each is; NaN where the file has no rate."""
        unknown = np.full(len(self), np.nan)
        return np.asarray(np.divide(self.frames, self.fps, out=unknown, where=self.fps > 0))


def list_clips(source: str | Iterable[str], *, recursive: bool = True) -> list[str]:
    """Paths of clips; as `list_images`, for the endings of clips."""
    return list_images(source, recursive=recursive, extensions=VIDEO_EXTENSIONS)


def read_clips(
    paths: Iterable[str | os.PathLike[str]],
    *,
    decode: bool = False,
    workers: int | None = None,
    engine: Engine = "auto",
    progress: Progress | None = None,
) -> ClipScan:
    """Read the frame size, the number of frames and the rate of each clip.

    Nothing is raised for a clip: what cannot be decoded is listed in `failures`.

    Args:
        paths: N video files, or folders of images.
        decode: decode every clip to the end, to find those that break off; slow.
        workers: at most this many threads or processes; None: as measured, 1: this thread alone.
        engine, progress: as in `read_sizes`.

    Raises:
        KohyaBucketError: one path in place of a list, or workers below 1; or PyAV is not installed.
    """
    refuse_one_path(paths)
    texts = [os.fspath(path) for path in paths]
    if importlib.util.find_spec("av") is None and not all(map(os.path.isdir, texts)):
        raise KohyaBucketError(f"clips are read by PyAV, which is not installed: {pip_install('video')}")
    job = Job("decoded clip" if decode else "clip", texts, workers=workers, engine=engine, progress=progress)
    job.run()
    rows = job.rows
    rate = np.divide(rows["rate"], rows["per"], out=np.zeros(len(texts)), where=rows["per"] > 0)
    return ClipScan(
        texts,
        np.stack([rows["width"], rows["height"]], axis=1).astype(np.int32),
        rows["frames"].astype(np.int64),
        rate,
        rows["rotation"].astype(np.int64),
        rows["source"].astype(np.uint8),
        [(i, texts[i], reason) for i, reason in sorted(job.failures)],
    )
