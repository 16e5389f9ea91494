"""Whatever cannot be read now, no cache of musubi-tuner's counts as missing or stale because of it."""

import errno
import json
import struct
from pathlib import Path

import pytest
from cache_folder import Folder

from kohya_bucket.errors import UnreadableError
from tests.faults import PASSING, Faults


def without_texts(file: Path) -> None:
    """As musubi-tuner alone writes it."""
    content = file.read_bytes()
    end = 8 + struct.unpack_from("<Q", content)[0]
    header = json.loads(content[8:end])
    del header["__metadata__"]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_every_call_of_the_system_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, noted: bool
) -> None:
    folder = Folder(tmp_path, 2)
    folder.make()
    for file in () if noted else (tmp_path / "cache").iterdir():
        without_texts(file)
    faults = Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(0), 0):
        assert folder.reasons() == [[]] * 2
        calls = faults.calls
    refused = 0
    for first in range(1, calls + 1):
        for failing in (range(first, first + 1), range(first, 10**9)):
            with faults.at(failing, code):
                try:
                    assert folder.reasons() == [[]] * 2
                except UnreadableError:
                    refused += 1
    assert refused > calls
