"""Damage to files, as a strategy, and what may follow from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from kohya_bucket.errors import KohyaBucketError

__all__ = ["mutated", "read_or_refused"]

# Lengths and counts at the edges of what they are stored in.
_NUMBERS = [
    *(b"\0", b"\xff", b"\x7f", b"\x80", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"),
    *(b"\0\0\0\x80", b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\n", b"[", b'"', b"-1", b"1e999", b"NaN"),
]
_edit = st.tuples(
    st.sampled_from(["set", "set", "set", "insert", "remove", "repeat", "end"]),
    st.floats(0, 1),
    st.integers(1, 64),
    st.one_of(st.sampled_from(_NUMBERS), st.binary(min_size=1, max_size=8)),
)


def mutated(whole: bytes, *, near_start: int | None = None) -> st.SearchStrategy[bytes]:
    """`whole` with one to six changes; with `near_start`, most of them within so many bytes of the beginning."""

    def change(edits: list[tuple[str, float, int, bytes]], whole_file: bool) -> bytes:
        data = bytearray(whole)
        for kind, place, length, piece in edits:
            reach = len(data) if near_start is None or whole_file else min(len(data), near_start)
            at = int(place * reach)
            if kind == "set":
                data[at : at + len(piece)] = piece
            elif kind == "insert":
                data[at:at] = piece
            elif kind == "remove":
                del data[at : at + length]
            elif kind == "repeat":
                data[at:at] = data[at : at + length]
            else:
                del data[at:]
        return bytes(data)

    return st.builds(change, st.lists(_edit, min_size=1, max_size=6), st.booleans())


def read_or_refused(read: Callable[..., Any], *arguments: Any, error: type[Exception] = KohyaBucketError) -> Any:
    """What `read` gives; None where it refuses its arguments. Anything else that is raised is a failure."""
    try:
        return read(*arguments)
    except error as refusal:
        said = str(refusal)
    assert said
    return None
