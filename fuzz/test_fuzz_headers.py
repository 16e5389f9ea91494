"""Image headers: the size that Pillow finds, or a reason. Never another size, nor anything else raised."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.mutations import mutated, read_or_refused
from kohya_bucket.images.formats import UnreadableImageError
from kohya_bucket.images.headers import header_of
from tests.images.image_corpus import corpus
from tests.pictures import pillow_size

CORPUS = dict(corpus())
KINDS = sorted({name.rsplit(".", 1)[1] for name in CORPUS})
BEGINNINGS = [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"RIFF\x40\0\0\0WEBPVP8X", b"GIF89a", b"BM", b"II*\0",
              b"\0\0\0\x1cftypavif", b"\0\0\0\x1cftypheic", b"\xff\x0a", b"P6\n", b"8BPS", b"\0\0\1\0"]  # fmt: skip


def size_of(data: bytes) -> tuple[int, int] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read_or_refused(header_of, data, error=UnreadableImageError)
    return found[:2] if found else None


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_damaged_files(kind: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in CORPUS if name.endswith(f".{kind}")]))
    damaged = data.draw(mutated(CORPUS[name], near_start=200))
    expected = pillow_size(damaged)
    if expected is not None:
        assert size_of(damaged) == expected
    else:
        size_of(damaged)


@given(st.sampled_from(BEGINNINGS), st.binary(max_size=200))
def test_invented_files(beginning: bytes, rest: bytes) -> None:
    expected = pillow_size(beginning + rest)
    found = size_of(beginning + rest)
    assert expected is None or found == expected
