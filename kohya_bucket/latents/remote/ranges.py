"""Few requests for many ranges: neighbours in a file are asked for together."""

from __future__ import annotations

from collections.abc import Sequence

from kohya_bucket.latents.remote.storage import Range, read_ranges

__all__ = ["merged", "read_merged"]

_GAP = 1 << 15  # bytes that are read for nothing where that spares a request
_MOST = 16 << 20  # bytes of one request


def merged(ranges: Sequence[Range]) -> list[tuple[Range, list[int]]]:
    """Ranges to ask for, and which of the given ones lie in each. Every given one lies in exactly one."""
    order = sorted(range(len(ranges)), key=lambda k: ranges[k])
    out: list[tuple[Range, list[int]]] = []
    for k in order:
        part = ranges[k]
        if out:
            last, inside = out[-1]
            stop = max(last.stop, part.stop)
            if last.url == part.url and part.start <= last.stop + _GAP and stop - last.start <= _MOST:
                out[-1] = (last._replace(stop=stop), [*inside, k])
                continue
        out.append((part, [k]))
    return out


def read_merged(ranges: Sequence[Range]) -> list[memoryview]:
    """The bytes of each range, which may be written into. Raises as `read_ranges`."""
    groups = merged(ranges)
    out: list[memoryview] = [memoryview(b"")] * len(ranges)
    for (whole, inside), data in zip(groups, read_ranges([whole for whole, _ in groups]), strict=True):
        view = memoryview(bytearray(data))
        for k in inside:
            out[k] = view[ranges[k].start - whole.start : ranges[k].stop - whole.start]
    return out
