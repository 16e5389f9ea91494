"""Shrinking by area, as OpenCV's INTER_AREA does it: bit for bit, without OpenCV.

Each pixel of the result is the mean over the part of the image that it covers; pixels at the edge of that part count
by the share that lies in it. Source: the behaviour of OpenCV 4 and 5 (`resize` with INTER_AREA, 8 bits per channel):
shares are float32 of float64 ratios, slivers below a thousandth of a pixel are left out, sums run from left to right
and then from top to bottom in float32. Where both sides shrink by whole factors, whole numbers are summed. Exact halves
are rounded to even, but up where both factors are 2 (and there are 1, 3 or 4 channels).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_SLIVER = 1e-3
_BAND = 1 << 17  # values of an image summed at a time: they and their sums fit into a processor's own cache


class _Shares(NamedTuple):
    """Which lines make up each of `after` lines, and by how much: both [K, after]."""

    at: npt.NDArray[np.intp]
    share: Floats


def shrink_by_area(pixels: Pixels, size: tuple[int, int], extent: tuple[float, float] | None = None) -> Pixels:
    """Scale [H, W, C] to `size` (width, height), neither side of which is larger; [height, width, C] uint8.

    `extent` (width, height): where the image ends, within the last column and row; None: behind them.
    """
    height, width, channels = pixels.shape
    right, bottom = extent or (width, height)
    if (right, bottom) == (width, height) and not width % size[0] and not height % size[1]:
        return _by_whole_factors(pixels, size)
    across, down = _shares(right, size[0], width), _shares(bottom, size[1], height)
    columns = (across.at[:, :, None] * channels + np.arange(channels)).reshape(len(across.at), -1)
    share = np.repeat(across.share, channels, axis=1)
    rows = pixels.reshape(height, width * channels)
    out = np.empty((size[1], size[0] * channels), np.uint8)
    step = max(1, _BAND * size[1] // pixels.size)
    for top in range(0, size[1], step):
        at = down.at[:, top : top + step]
        first = int(at.min())
        band = rows[first : int(at.max()) + 1].astype(np.float32)
        sums = _sum((band.take(c, axis=1) for c in columns), share)
        out[top : top + step] = np.rint(_sum((sums[k] for k in at - first), down.share[:, top : top + step, None]))
    return out.reshape(size[1], size[0], channels)


def _sum(parts: Iterable[Floats], shares: Floats) -> Floats:
    """Add up parts, each times its shares, in their order: numpy's own sum may take pairs."""
    sums: Floats = np.zeros((), np.float32)
    for part, share in zip(parts, shares, strict=True):
        part *= share
        sums = np.add(sums, part, out=part)
    return sums


def _by_whole_factors(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    height, width, channels = pixels.shape
    across, down = width // size[0], height // size[1]
    half_up, part = across == down == 2 != channels, np.float32(1) / np.float32(across * down)
    lines = pixels.reshape(size[1], down, width * channels)
    out = np.empty((size[1], size[0], channels), np.uint8)
    step = max(1, _BAND // (width * channels))
    for top in range(0, size[1], step):
        band = lines[top : top + step]
        columns = band[:, 0].astype(np.uint16 if down <= 257 else np.uint32)
        for k in range(1, down):
            columns += band[:, k]
        columns = columns.reshape(len(band), size[0], across * channels)
        for channel in range(channels):
            sums = columns[:, :, channel].astype(np.uint32)
            for k in range(1, across):
                sums += columns[:, :, k * channels + channel]
            means = (sums + 2) >> 2 if half_up else np.rint(sums.astype(np.float32) * part)
            out[top : top + step, :, channel] = means
    return out


def _shares(before: float, after: int, lines: int) -> _Shares:
    scale = before / after
    begin = np.arange(after) * scale
    end = begin + scale
    width = np.minimum(scale, before - begin)
    last = np.minimum(np.floor(end).astype(np.intp), lines - 1)
    first = np.minimum(np.ceil(begin).astype(np.intp), last)
    at = first - 1 + np.arange(int((last - first).max()) + 2)[:, None]
    lead, tail = first - begin, np.minimum(np.minimum(end - last, 1.0), width)
    share = np.where(at < last, 1.0, np.where((at == last) & (end - last > _SLIVER), tail, 0.0))
    share = np.where(at < first, np.where(lead > _SLIVER, lead, 0.0), share) / width
    used = share.any(axis=1)
    return _Shares(np.clip(at, 0, lines - 1)[used], share[used].astype(np.float32))
