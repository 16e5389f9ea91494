"""Every command that writes, where there is no room: what was there stays, and one line says why."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.errors import KohyaBucketError
from tests.full_disk import NoRoom
from tests.thinned import one_in

COMMANDS = [
    ("analyze", "{data}", "--quiet", "--html", "{out}/report.html"),
    ("analyze", "{data}", "--quiet", "--cache", "{out}/sizes.parquet"),
    ("explore", "{data}", "--quiet", "--no-open", "--out", "{out}/explorer.html"),
    ("cache", "sizes", "{data}", "--quiet", "--output", "{out}/sizes.parquet"),
    ("buckets", "make", "{data}", "--num", "2", "--output", "{out}/set.toml"),
    ("buckets", "chart", "--preset", "sdxl", "--output", "{out}/chart.svg"),
    ("simulate", "{data}/0.png", "--preview", "{out}/preview.png"),
    ("cache", "pack", "{out}/store"),
    ("cache", "prune", "{out}/store"),
    ("cache", "prune", "{out}/store", "--damaged"),
    ("cache", "import", "{data}", "--arch", "sd", "--quiet", "--output", "{out}/store"),
    ("cache", "export", "{store}", "--arch", "sd", "--quiet", "--output", "{out}/npz"),
]


@pytest.fixture(params=one_in(3, ["limit", "tmpfs", "read-only"]))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> NoRoom:
    """A folder that can be full, limited, or read-only."""
    if request.param == "read-only":
        return ReadOnly(request.getfixturevalue("small_disk"))
    if request.param == "tmpfs":
        return NoRoom(request.getfixturevalue("small_disk"), "tmpfs")
    pytest.importorskip("resource", reason="this system has no limits on files")
    (tmp_path / "no_room").mkdir()
    return NoRoom(tmp_path / "no_room", "limit")


class ReadOnly(NoRoom):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "read-only")
        self.reason = "[Rr]ead-only"

    @contextmanager
    def full(self) -> Iterator[None]:
        subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True)
        try:
            yield
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(self.folder)], check=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file; of a store every item, since upkeep may have moved it, and whatever is half written."""
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (path.suffix == ".tmp" or not path.is_relative_to(folder / "store"))
    }
    if (folder / "store").is_dir():
        from kohya_bucket.latents import LatentStore

        store = LatentStore(folder / "store")
        found |= {f"{store.entry(i)}": store.read(i).tobytes() for i in range(len(store)) if store.check(i) is None}
    return found


def make_store(root: Path, damage: bool) -> None:
    from tests.latents.latent_helpers import fill

    for name in ("a.png", "b.png", "a.png"):
        fill(root, [name])
    if damage:
        shard = min((root / "shards").iterdir(), key=lambda path: path.stat().st_size)
        data = bytearray(shard.read_bytes())
        data[-1500] ^= 1
        shard.write_bytes(data)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command).replace("{", "").replace("}", ""))
def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, folder: Path, place: NoRoom, command: tuple[str, ...]
) -> None:
    out, store = place.folder, tmp_path / "store"
    arguments = [part.format(data=folder, out=out, store=store) for part in command]
    keeps_sizes = command[1] == "sizes"
    if command[0] == "cache" and not keeps_sizes:
        make_store(store, False)
        shutil.copytree(store, out / "store")
        make_store(out / "store", "--damaged" in command)
        from tests.trainers.sdscripts.npz.test_npz import ARCHITECTURES, item, npz

        npz.write_npz(folder / "0_0300x0400_sd.npz", item(ARCHITECTURES["sd"]), (128, 64), ARCHITECTURES["sd"])
    else:
        assert CliRunner().invoke(app, arguments).exit_code == 0
        if command[0] == "analyze" or keeps_sizes:
            from tests.pictures import make_pictures

            make_pictures(folder / "more", [(200, 400)] * 3)
    before = contents(out)
    assert before
    with place.full():
        result = CliRunner().invoke(app, arguments)
    if command[1] != "prune" or result.exception is not None:  # which makes room and may be done
        assert isinstance(result.exception, KohyaBucketError), (result.exception, result.output)
        assert "\n" not in str(result.exception)
    assert contents(out) == before
