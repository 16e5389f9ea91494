"""Whatever the package writes goes through `kohya_bucket.files`: it is there whole or not at all."""

import ast
import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kohya_bucket
from kohya_bucket import files
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.files import GroupedSync, replace_file, update_file, write_file

PACKAGE = Path(kohya_bucket.__file__).parent

WRITERS = {
    "write_text", "write_bytes", "touch", "savefig", "savez", "savez_compressed", "tofile", "to_csv", "to_json",
    "to_parquet", "write_table", "write_feather", "save_file", "mkstemp", "NamedTemporaryFile", "TemporaryFile",
    "copy2", "copyfile", "copyfileobj", "copytree", "renames", "symlink", "truncate", "memmap", "open_memmap",
}  # fmt: skip
# (file, call): why it may
ALLOWED = {
    ("files.py", "open(temporary, 'xb')"): "the writer itself",
    ("files.py", "open(temporary, 'rb+')"): "the writer itself",
    ("files.py", "open(path, 'wb')"): "the writer itself",
    ("files.py", "open(path, 'rb+')"): "waits for what it wrote",
    ("files.py", "os.replace(source, target)"): "the writer itself",
    ("files.py", "os.rename(temporary, held)"): "the writer itself",
    ("trainers/sdscripts/npz/read_write.py", "zipfile.ZipFile(out, 'w')"): "into memory",
    ("trainers/sdscripts/npz/read_write.py", "archive.open(f'{name}.npy', 'w', force_zip64=True)"): "into memory",
    ("latents/store/entries.py", "pq.write_table(table.replace_schema_metadata({FORMAT: text}), out, "
     "compression='zstd', store_schema=True)"): "into memory",
    ("latents/store/contents.py", "out.write_table(column)"): "into memory",
    ("images/pixels.py", "smooth.save(file, 'JPEG', quality=85, subsampling=subsampling)"): "into memory",
    ("images/metadata_cache.py", "pq.write_table(table, out, compression='zstd')"): "for replace_file",
    ("images/tar_index.py", "pq.write_table(table, out, compression='zstd')"): "for replace_file",
    ("latents/store/writer.py", "info.to_json()"): "gives a value",
    ("latents/store/remote_shards.py", "file.truncate(nbytes)"): "of `write_file`",
    ("images/mend_log.py", "open(run / _LOG, 'x', encoding='utf-8', newline='\\n')"): "a log that grows by lines",
    ("images/mend_log.py", "open(files.new, 'xb')"): "renamed to where nothing is",
    ("images/mend_log.py", "os.link(source, target, follow_symlinks=False)"): "fails where something has that name",
    ("images/mend_log.py", "open(claim, 'x', encoding='utf-8')"): "says who is at work",
    # which are caught where they end in one of those above
    ("trainers/door/sizes.py", "(fresh if cache is None else _with_others(fresh, cache)).save(file)"):
        "a MetadataCache",
    ("cli/commands/cache.py", "cache.save(output)"): "a MetadataCache",
    ("cli/commands/cache.py", "interrupt.cache.save(output)"): "a MetadataCache",
    ("cli/subjects.py", "_with_others_of(before, scanned).save(self.cache)"): "a MetadataCache",
    ("images/scan_worker.py", "pickle.dump(ask(look, paths), outgoing)"): "into a pipe",
    ("images/scan_worker.py", "pickle.dump((look, paths), self._process.stdin)"): "into a pipe",
    ("datasets/webdataset.py", "built.save(index)"): "a TarIndex",
    ("cli/commands/cache.py", "tars.save(output)"): "a TarIndex",
    ("trainers/sdscripts/caching/latents.py", "self.cache.save(item, latents, crop_ltrb, flipped, alpha_mask, "
     "keys=key_reso_suffix)"): "an npz or a store",
    ("trainers/sdscripts/caching/npz_cache.py", "save(str(made))"): "sd-scripts' own, into a folder of the moment",
    ("trainers/door/ranks.py", "Path(folder, str(os.getpid())).touch()"): "an empty file, in the launcher's own folder",
    ("trainers/sdscripts/caching/text.py", "savez(file, *arrays, **named)"): "another's call of numpy, passed on",
    ("trainers/musubi/caching.py", "session.save(saved)"): "`save_item`, behind the encoder",
    ("trainers/musubi/loops.py", "session.save(later)"): "`save_item`, behind the encoder",
    ("trainers/musubi/caching.py", "save()"): "musubi-tuner's own, for `replacing`",
    ("trainers/musubi/caching.py", "shutil.copyfile(path, temporary)"): "for `replacing`",
    ("trainers/musubi/cache_files.py", "temporary.write_bytes(with_texts(temporary.read_bytes(), "
     "said.as_text(file)))"): "for `replacing`",
}  # fmt: skip


def writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("open", "ZipFile", "TarFile", "fdopen"):
        modes = [*call.args[:2], *(k.value for k in call.keywords if k.arg == "mode")]
        texts = [m.value for m in modes if isinstance(m, ast.Constant) and isinstance(m.value, str)]
        flags = ast.unparse(call)
        return any(set(t) <= set("rwxabt+:") and set(t) & set("wxa+") for t in texts) or "O_CREAT" in flags
    if name == "save":  # of a picture or an array: what it is given is no name but memory, or a name
        return not call.args or ast.unparse(call.args[0]) not in ("buffer", "out")
    if name == "dump":
        return True
    if name in ("replace", "rename", "link", "move"):  # those of `str`, `dataclasses` and numpy have the same names
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        return isinstance(owner, ast.Name) and owner.id in ("os", "shutil")
    return name in WRITERS


@pytest.mark.long
def test_nothing_writes_past_the_one_writer() -> None:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and writes(node):
                found.add((file, ast.unparse(node)))
    assert found == ALLOWED.keys()


@pytest.mark.parametrize("old", [b"old", None])
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_what_is_interrupted_leaves_what_was_there(tmp_path: Path, how: str, old: bytes | None) -> None:
    file = tmp_path / "report.html"
    if old is not None:
        file.write_bytes(old)
    program = f"""
import os
from kohya_bucket.files import GroupedSync, replace_file, write_file
def half(out):
    out.write(b"half")
    out.flush()
    {"os._exit(9)" if how == "killed" else "raise OSError(28, 'No space left on device')"}
replace_file({os.fspath(file)!r}, half)
"""
    environment = os.environ | {"PYTHONPATH": os.fspath(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert done.returncode == (9 if how == "killed" else 1)
    assert (file.read_bytes() if file.exists() else None) == old
    left = [path.name for path in tmp_path.iterdir() if path != file]
    assert all(name.startswith(".report.html.") and name.endswith(".tmp") for name in left)
    assert len(left) == (how == "killed")


@pytest.mark.parametrize("length", [230, 250, 255])
def test_any_name_that_a_file_can_have(tmp_path: Path, length: int) -> None:
    file = tmp_path / ("x" * (length - 4) + ".npz")
    write_file(file, [b"whole"])
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_link_stays_one_and_permissions_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "file.toml", tmp_path / "link.toml"
    file.write_bytes(b"old")
    file.chmod(0o640)
    mode = file.stat().st_mode
    try:
        link.symlink_to(file)
    except OSError:
        pytest.skip("no links here")
    if not link.is_symlink():
        pytest.skip("Wine makes no links")
    replace_file(link, b"new")
    assert link.is_symlink()
    assert (file.read_bytes(), file.stat().st_mode) == (b"new", mode)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    replace_file(pipe, b"content")
    reader.join()
    assert read == [b"content"]
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="this system does not name open files")
def test_a_pipe_without_a_name_is_written_to() -> None:
    reading, writing = os.pipe()
    replace_file(f"/dev/fd/{writing}", b"content")
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"content"


def test_a_folder_in_the_place_of_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(KohyaBucketError, match=f"{tmp_path.name}: cannot be written"):
        replace_file(tmp_path, b"content")


def test_groups_of_files_and_their_folder_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced = os.fsync, set()

    def fsync(handle: int) -> None:
        real(handle)
        synced.add(os.fstat(handle).st_ino)

    def on_disk(items: range) -> bool:
        wanted = {(tmp_path / str(item)).stat().st_ino for item in items}
        return wanted | ({tmp_path.stat().st_ino} if os.name != "nt" else set()) <= synced

    monkeypatch.setattr(os, "fsync", fsync)
    with ThreadPoolExecutor(2) as pool:
        groups = GroupedSync(pool, 3)
        for item in range(8):
            write_file(tmp_path / str(item), [b"content"], sync=False)
            groups.add(tmp_path / str(item))
        assert on_disk(range(3))  # those of the second group are being waited for
        groups.finish()
    assert on_disk(range(8))


class WindowsOnce:
    """The module `os`, where each of some calls is refused once, as Windows does while a folder is being removed."""

    name = "nt"

    def __init__(self, *calls: str) -> None:
        self.refuses = set(calls)

    def __getattr__(self, name: str) -> Any:
        if name in self.refuses:
            self.refuses.remove(name)
            raise PermissionError(errno.EACCES, "Access is denied")
        return getattr(os, name)


def test_a_lock_that_is_just_being_removed_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "notes"
    windows = WindowsOnce("listdir", "rename")
    monkeypatch.setattr(files, "os", windows)
    update_file(file, lambda before: (before or b"") + b"1")
    assert not windows.refuses
    lock = tmp_path / ".notes.000000000000.tmp"
    lock.mkdir()
    windows.refuses.add("listdir")
    timer = threading.Timer(0.05, lock.rmdir)
    timer.start()
    update_file(file, lambda before: (before or b"") + b"2")
    timer.join()
    assert file.read_bytes() == b"12"
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
