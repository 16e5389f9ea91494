"""Absolute paths as `os.path.abspath` gives them."""

from __future__ import annotations

import os

import pytest

from kohya_bucket.images.listing import absolute_paths

PLAIN = ["/a/b.png", "/a b/ä.png", "/c"]
OTHERS = ["/a/../b.png", "/a/./b", "/.hidden/b", "//a/b", "/a//b", "/a/", "/", "a.png", "./a", "../a", "a\n/b", "/a/b."]


@pytest.mark.parametrize("more", [[], *([other] for other in OTHERS)], ids=repr)
@pytest.mark.skipif(os.name == "nt", reason="names of POSIX")
def test_they_are_what_abspath_says(more: list[str]) -> None:
    for paths in (PLAIN + more, more + PLAIN, more):
        assert absolute_paths(paths) == [os.path.abspath(path) for path in paths]  # noqa: PTH100


def test_urls_stay() -> None:
    assert absolute_paths(["s3://a/../b", "https://x/y.png"]) == ["s3://a/../b", "https://x/y.png"]
