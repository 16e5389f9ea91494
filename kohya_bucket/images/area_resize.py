"""Shrinking by area, as OpenCV's INTER_AREA does it: bit for bit, without OpenCV.

Each pixel of the result is the mean over the part of the image that it covers; pixels at the edge of that part count
by the share that lies in it. Source: the behaviour of OpenCV 4 and 5 (`resize` with INTER_AREA, 8 bits per channel):
shares are float32 of float64 ratios, slivers below a thousandth of a pixel are left out, sums run from left to right
and then from top to bottom in float32. Where both sides shrink by whole factors, whole numbers are summed. Exact halves
are rounded to even, but up where both factors are 2.

The sums are products of small matrices (numpy's BLAS), in whatever order those add. That gives the same bits wherever
the mean is farther from a half than both sums can be wrong; the rest, one value in a thousand, is summed in OpenCV's
order. Bands of the image are worked on that fit into a processor's own cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["shrink_by_area"]

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_SLIVER = 1e-3
_STRIP = 512  # floats of a row that one product takes
_PRODUCT = 1 << 18  # multiplications in one product: from there on OpenBLAS starts threads
_BAND = 1 << 18  # values of an image summed at a time
_POINTS = 1 << 18  # pixels gathered at a time for sums in OpenCV's order


class _Shares(NamedTuple):
    """Which lines make up each of `after` lines, and by how much: both [K, after]."""

    at: npt.NDArray[np.intp]
    share: Floats


class _Blocks(NamedTuple):
    """The same as matrices: block b makes lines `step * b` and on from `n` lines that begin at `first[b]`."""

    step: int
    first: list[int]
    weights: Floats  # [blocks, step, n]


def shrink_by_area(pixels: Pixels, size: tuple[int, int], extent: tuple[float, float] | None = None) -> Pixels:
    """Scale [H, W, C] to `size` (width, height), neither side of which is larger; [height, width, C] uint8.

    `extent` (width, height): where the image ends, within the last column and row; None: behind them.
    """
    height, width, channels = pixels.shape
    right, bottom = extent or (width, height)
    if (right, bottom) == (width, height) and not width % size[0] and not height % size[1]:
        return _by_whole_factors(pixels, size)
    across, down = _shares(right, size[0], width), _shares(bottom, size[1], height)
    out = np.empty((size[1], size[0] * channels), np.uint8)
    for top, sums in _bands(pixels.reshape(height, width * channels), across, down, channels):
        below = _Shares(down.at[:, top:], down.share[:, top:])
        _round(sums, out[top : top + len(sums)], pixels, across, below)
    return out.reshape(size[1], size[0], channels)


def _by_whole_factors(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    height, width, channels = pixels.shape
    across, down = width // size[0], height // size[1]
    half_up, part = across == down == 2, np.float32(1) / np.float32(across * down)
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


def _bands(rows: Pixels, across: _Shares, down: _Shares, channels: int) -> Iterator[tuple[int, Floats]]:
    """Yield (top, sums [band, after across * channels]) of bands of the result; the array is used again."""
    length = rows.shape[1]
    upright, level = _blocks(down, len(rows)), _blocks(across, length // channels)
    lines = upright.weights.shape[2]
    padded = -(-length // _STRIP) * _STRIP
    taken = np.zeros((lines, padded), np.float32)
    wide = _per_channel(level.weights, channels)
    per_band = max(1, min(128, _PRODUCT // wide[0].size) // upright.step)
    made = np.empty((per_band * upright.step, padded), np.float32)
    sums = np.empty((len(made), wide.shape[0] * wide.shape[2]), np.float32)
    starts = [first * channels for first in level.first]
    for begin in range(0, len(upright.first), per_band):
        for k, first in enumerate(upright.first[begin : begin + per_band]):
            taken[:, :length] = rows[first : first + lines]
            part = made[k * upright.step : (k + 1) * upright.step]
            np.matmul(upright.weights[begin + k], _strips(taken), out=_strips(part))
        top = begin * upright.step
        n = min(len(made), down.at.shape[1] - top)
        for k, (start, weights) in enumerate(zip(starts, wide, strict=True)):
            columns = slice(k * weights.shape[1], (k + 1) * weights.shape[1])
            np.matmul(made[:n, start : start + len(weights)], weights, out=sums[:n, columns])
        yield top, sums[:n, : across.at.shape[1] * channels]


def _strips(lines: Floats) -> Floats:
    """[n, L] seen as [L / strip, n, strip]."""
    n, length = lines.shape
    strips: Floats = lines.reshape(n, length // _STRIP, _STRIP).transpose(1, 0, 2)
    return strips


def _round(sums: Floats, out: Pixels, pixels: Pixels, across: _Shares, down: _Shares) -> None:
    """Put rounded `sums` [rows, W * C] into `out`; what lies near a half is summed again."""
    near = np.float32(0.5) - np.float32((len(across.at) + len(down.at) + 4) * 2.0**-15)
    rounded = np.rint(sums)
    out[:] = rounded
    rounded -= sums
    where = np.flatnonzero(np.abs(rounded, out=rounded) > near)
    channels = pixels.shape[2]
    step = max(1, _POINTS // (len(across.at) * len(down.at)))
    for start in range(0, len(where), step):
        y, x = np.divmod(where[start : start + step], out.shape[1])
        column, channel = np.divmod(x, channels)
        parts = pixels[down.at[:, None, y], across.at[None, :, column], channel] * across.share[:, column]
        total = _in_order(_in_order(parts.swapaxes(0, 1)) * down.share[:, y])
        out[y, x] = np.rint(total)


def _in_order(terms: Floats) -> Floats:
    """Sum over the first axis from its beginning to its end; numpy's own sum may take pairs."""
    total: Floats = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total


def _blocks(shares: _Shares, lines: int) -> _Blocks:
    k, after = shares.at.shape
    step = max(2, min(16, 32 * after // lines))
    line = np.arange(after)
    block = line // step
    first = shares.at[0, ::step]
    last = shares.at[-1, np.minimum(np.arange(step, after + step, step), after) - 1]
    n = int((last - first).max()) + 1
    first = np.minimum(first, lines - n)
    weights = np.zeros((len(first), step, n), np.float32)
    for i in range(k):
        weights[block, line % step, shares.at[i] - first[block]] += shares.share[i]
    return _Blocks(step, first.tolist(), weights)


def _per_channel(weights: Floats, channels: int) -> Floats:
    """[blocks, step, n] as matrices for interleaved channels, [blocks, n * channels, step * channels]."""
    blocks, step, n = weights.shape
    wide = np.zeros((blocks, n, channels, step, channels), weights.dtype)
    for channel in range(channels):
        wide[:, :, channel, :, channel] = weights.swapaxes(1, 2)
    return wide.reshape(blocks, n * channels, step * channels)


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
