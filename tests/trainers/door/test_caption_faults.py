"""Caption files that cannot be reached now are not taken for missing ones."""

import errno

import pytest

from kohya_bucket.trainers.door.captions import check_broken, read_captions
from kohya_bucket.trainers.door.findings import Findings
from tests.faults import PASSING, Faults


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_a_folder_that_does_not_answer_has_captions_that_cannot_be_read(tmp_path, monkeypatch, code):
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    (tmp_path / "a.txt").write_text("a cat", encoding="utf-8")
    faults = Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(1, 100), code):
        texts, broken = read_captions(files)
    assert texts == [None, None]
    assert list(broken) == files
    findings = Findings()
    check_broken(broken, "a trainer", "", findings)
    assert [finding.remedy for finding in findings] == ["write a caption that can be read, or move the file away"]
    assert read_captions(files) == (["a cat", None], {})


@pytest.mark.posix("links that lead in a circle, names of 300 bytes")
def test_names_that_no_file_can_have_are_of_none(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    names = ["a\0b", "n" * 300, "file/a.txt", "circle", "gone/a.txt"]
    assert read_captions([str(tmp_path / name) for name in names]) == ([None] * 5, {})
