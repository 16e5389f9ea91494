"""What Windows refuses is refused here: the same cases on Windows itself and, by `refusals`, on Linux."""

import mmap
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform not in ("win32", "linux"), reason="who has a file open is not known here")

HOLDERS = {
    "open": "file = open(sys.argv[1], 'rb')",
    "mapped": "file = open(sys.argv[1], 'rb'); kept = mmap.mmap(file.fileno(), 0, access=1); file.close()",
}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "folder").mkdir()
    held, other = tmp_path / "folder" / "held", tmp_path / "other"
    for path in (held, other):
        path.write_bytes(b"0123456789")
    return held, other


@contextmanager
def held_by(how: str, path: Path, elsewhere: bool) -> Iterator[None]:
    if not elsewhere:
        with open(path, "rb") as file:
            kept = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if how == "mapped" else None
            if how == "mapped":
                file.close()
            yield
            del kept
        return
    code = f"import mmap, sys; {HOLDERS[how]}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize("how", HOLDERS)
def test_a_file_in_use_is_not_replaced_moved_or_removed(files, how, elsewhere):
    held, other = files
    with held_by(how, held, elsewhere):
        for refused in (
            lambda: other.replace(held),
            lambda: held.replace(other),
            held.unlink,
            lambda: held.rename(held.with_name("new")),
            lambda: shutil.rmtree(held.parent),
        ):
            with pytest.raises(PermissionError):
                refused()
        if how == "mapped":
            with pytest.raises(OSError, match=r"as on Windows|Invalid argument|1224"):
                held.write_bytes(b"new")
        assert (held.read_bytes(), other.read_bytes()) == (b"0123456789", b"0123456789")
    other.replace(held)
    held.unlink()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_a_folder_with_a_file_in_use_is_not_renamed(files, elsewhere):
    held, _ = files
    if _is_wine():
        pytest.skip("Wine renames it")
    with held_by("open", held, elsewhere), pytest.raises(PermissionError):
        held.parent.rename(held.parent.with_name("new"))


def test_a_read_only_file_is_neither_replaced_nor_removed_nor_written(files):
    if _is_wine():
        pytest.skip("Wine refuses root nothing")
    held, other = files
    held.chmod(0o444)
    for refuse in (lambda: held.write_bytes(b""), held.unlink, lambda: other.replace(held)):
        with pytest.raises(PermissionError):
            refuse()
    assert held.read_bytes() == b"0123456789"
    held.chmod(0o644)


def test_names_that_differ_by_letter_case_are_one_file(tmp_path):
    (tmp_path / "Case.TXT").write_text("1", encoding="utf-8")
    assert (tmp_path / "case.txt").read_text(encoding="utf-8") == "1"
    (tmp_path / "CASE.txt").write_text("2", encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["Case.TXT"]
    with pytest.raises(FileExistsError):
        (tmp_path / "CASE.TXT").mkdir()
    if not _is_wine():  # which leaves it
        (tmp_path / "Case.TXT").rename(tmp_path / "case.txt")
        assert [path.name for path in tmp_path.iterdir()] == ["case.txt"]


def test_text_without_an_encoding_is_cp1252(tmp_path):
    if sys.platform == "win32" and sys.flags.utf8_mode:
        pytest.skip("this Python was told to use UTF-8")
    (tmp_path / "text").write_text("Jörg")
    assert (tmp_path / "text").read_bytes() == b"J\xf6rg"
    with pytest.raises(UnicodeEncodeError), open(tmp_path / "text", "w") as file:
        file.write("猫")


def test_a_rename_replaces_nothing(files):
    held, other = files
    with pytest.raises(FileExistsError):
        other.rename(held)


def _is_wine() -> bool:
    if sys.platform != "win32":
        return False
    import ctypes

    return hasattr(ctypes.windll.ntdll, "wine_get_version")
