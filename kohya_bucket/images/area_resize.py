"""Shrinking by area, as OpenCV's INTER_AREA does it: bit for bit, without OpenCV.

Each pixel of the result is the mean over the part of the image that it covers; pixels at the edge of that part count
by the share that lies in it. Source: the behaviour of OpenCV 4 and 5 (`resize` with INTER_AREA, 8 bits per channel):
shares are float32 of float64 ratios, slivers below a thousandth of a pixel are left out, sums run from left to right
and then from top to bottom in float32. Where both sides shrink by whole factors, whole numbers are summed. Exact halves
are rounded to even, but up where both factors are 2 (and there are 1, 3 or 4 channels).

The sums are products of small matrices (numpy's BLAS), in whatever order those add. That gives the same bits wherever
the mean is farther from a half than both sums can be wrong; the rest, one value in a thousand, is summed in OpenCV's
order. Bands of the image are worked on that fit into a processor's own cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_SLIVER = 1e-3
_SLACK = 2  # lines that a block may begin early, for runs of several blocks
_TAKEN = 1 << 19  # values of an image that one product takes
_STRIP = 512  # floats of a row that one product takes
_PRODUCT = 1 << 18  # multiplications in one product: from there on OpenBLAS starts threads
_BAND = 1 << 18  # values of an image summed at a time
_POINTS = 1 << 18  # pixels gathered at a time for sums in OpenCV's order


class _Shares(NamedTuple):
    """Which lines make up each of `after` lines, and by how much: both [K, after]."""

    at: npt.NDArray[np.intp]
    share: Floats


class _Blocks(NamedTuple):
    """The same as matrices: block b makes lines `step * b` and on from `n` lines that begin at `first[b]`.

    Blocks of a run (begin, end) begin at equal distances, so that one product of strided views makes them all. They
    may reach beyond the last line, with weights of 0.
    """

    step: int
    first: npt.NDArray[np.intp]
    distance: int
    runs: list[tuple[int, int]]
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
    near = np.float32(0.5) - np.float32((len(across.at) + len(down.at) + 4) * 2.0**-15)
    again = []
    for top, sums in _bands(pixels.reshape(height, width * channels), across, down, channels):
        rounded = np.rint(sums)
        out[top : top + len(sums)] = rounded
        rounded -= sums
        again.append(np.flatnonzero(np.abs(rounded, out=rounded) > near) + top * out.shape[1])
    _sum_in_order(np.concatenate(again), out, pixels, across, down)
    return out.reshape(size[1], size[0], channels)


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


def _bands(rows: Pixels, across: _Shares, down: _Shares, channels: int) -> Iterator[tuple[int, Floats]]:
    """Yield (top, sums [band, after across * channels]) of bands of the result; the array is used again.

    Each call of numpy lets go of the interpreter's lock and takes it again, so that threads wait for each other where
    calls are many and short: here they are a few for a band.
    """
    length = rows.shape[1]
    upright, level = _blocks(down), _blocks(across)
    step, lines = upright.weights.shape[1:]
    wide = _per_channel(level.weights, channels)
    strip = max(64, min(_STRIP, _PRODUCT // (step * lines)) // 64 * 64)
    padded = -(-max(length, int(level.first.max()) * channels + wide.shape[1]) // strip) * strip
    per_band = max(1, min(128, _PRODUCT // wide[0].size) // step)
    at_once = max(1, min(per_band, (_TAKEN // padded - lines) // upright.distance + 1))
    taken = np.zeros((upright.distance * (at_once - 1) + lines, padded), np.float32)
    made = np.empty((per_band * step, padded), np.float32)
    sums = np.empty((len(made), wide.shape[0] * wide.shape[2]), np.float32)
    for begin in range(0, len(upright.first), per_band):
        end = min(begin + per_band, len(upright.first))
        for first, last in _pieces(upright.runs, begin, end, at_once):
            start, blocks = int(upright.first[first]), last - first
            band = rows[start : start + (blocks - 1) * upright.distance + lines]
            taken[: len(band), :length] = band
            shape = blocks, padded // strip
            windows = _windows(taken, (*shape, lines, strip), (upright.distance, 0, 1, 0), (0, strip, 0, 1))
            into = _windows(made[(first - begin) * step :], (*shape, step, strip), (step, 0, 1, 0), (0, strip, 0, 1))
            np.matmul(upright.weights[first:last, None], windows, out=into)
        top = begin * step
        n = min((end - begin) * step, down.at.shape[1] - top)
        for first, last in level.runs:
            source, target = made[:, int(level.first[first]) * channels :], sums[:, first * wide.shape[2] :]
            windows = _windows(source, (last - first, n, wide.shape[1]), (0, 1, 0), (level.distance * channels, 0, 1))
            into = _windows(target, (last - first, n, wide.shape[2]), (0, 1, 0), (wide.shape[2], 0, 1))
            np.matmul(windows, wide[first:last], out=into)
        yield top, sums[:n, : across.at.shape[1] * channels]


def _pieces(runs: list[tuple[int, int]], begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """The blocks from `begin` to `end`, at most so many at a time, none of two runs together."""
    for first, last in runs:
        last = min(last, end)
        for start in range(max(first, begin), last, most):
            yield start, min(start + most, last)


def _windows(lines: Floats, shape: tuple[int, ...], down: tuple[int, ...], across: tuple[int, ...]) -> Floats:
    """A view of `lines` [n, L] in which a step along axis k goes `down[k]` lines and `across[k]` columns on."""
    row, column = lines.strides
    return as_strided(lines, shape, [d * row + a * column for d, a in zip(down, across, strict=True)])


def _sum_in_order(
    where: npt.NDArray[np.intp], out: Pixels, pixels: Pixels, across: _Shares, down: _Shares
) -> None:  # fmt: skip
    """Put into `out` [rows, W * C], at these places, sums in OpenCV's order, rounded."""
    channels = pixels.shape[2]
    step = max(1, _POINTS // (len(across.at) * len(down.at)))
    for start in range(0, len(where), step):
        y, x = np.divmod(where[start : start + step], out.shape[1])
        column, channel = np.divmod(x, channels)
        parts = pixels[down.at[:, None, y], across.at[None, :, column], channel] * across.share[:, column]
        # numpy's own sum may take pairs
        out[y, x] = np.rint(reduce(np.add, reduce(np.add, parts.swapaxes(0, 1)) * down.share[:, y]))


def _blocks(shares: _Shares) -> _Blocks:
    counts = shares.share > 0
    scale, after = int(shares.at.max() + 1) / counts.shape[1], counts.shape[1]
    most = max(2, min(16, int(32 / scale)))
    step = min(range(most, most * 3 // 4, -1), key=lambda step: abs(step * scale - round(step * scale)))
    low = np.where(counts, shares.at, np.iinfo(np.intp).max).min(axis=0)[::step]
    high = np.where(counts, shares.at, 0).max(axis=0)[np.minimum(np.arange(step, after + step, step), after) - 1]
    distance = round(step * scale)
    runs, begin = [], 0
    while begin < len(low):
        regular = distance * np.arange(len(low) - begin)
        least = np.minimum.accumulate(low[begin:] - regular)
        early = np.maximum.accumulate(low[begin:] - regular) - least
        n = int(np.count_nonzero((early <= _SLACK) & (least >= 0)))
        low[begin : begin + n] = least[n - 1] + regular[:n]
        runs.append((begin, begin + n))
        begin += n
    weights = np.zeros((len(low), step, int((high - low).max()) + 1), np.float32)
    k, line = np.nonzero(counts)
    weights[line // step, line % step, shares.at[k, line] - low[line // step]] = shares.share[k, line]
    return _Blocks(step, low, distance, runs, weights)


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
