"""Folders as a training lists them."""

import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kohya_bucket.errors import UnreadableError
from kohya_bucket.trainers.sdscripts.seams import _glob_images
from tests.faults import PASSING, Faults

SEAM = cast("Any", SimpleNamespace(door=SimpleNamespace(owners=SimpleNamespace(named=lambda _: [".png"]))))


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_listed_now_is_not_trained_as_an_empty_one(tmp_path, monkeypatch, code):
    (tmp_path / "a.png").touch()
    assert _glob_images(SEAM, str(tmp_path)) == [str(tmp_path / "a.png")]
    for nothing in (tmp_path / "gone", tmp_path / "a.png"):
        assert _glob_images(SEAM, str(nothing)) == []
    faults = Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(1, 2), code), pytest.raises(UnreadableError, match="cannot be read now"):
        _glob_images(SEAM, str(tmp_path))
