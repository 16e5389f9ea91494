"""Whatever stands in the place of an input file: each command ends, soon and in little memory, with one error or a
named skip, and deletes nothing."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command_line import Command
from tests.thinned import weekly

_SECONDS = 20
_MEMORY = 400 << 20
_CONFIG = """
[general]
resolution = 512
enable_bucket = true
caption_extension = ".txt"
[[datasets]]
[[datasets.subsets]]
image_dir = {folder}
{more}
"""


def _pipe(path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    os.mkfifo(path)


def _device(path: Path) -> None:
    if os.name == "nt" or not Path("/dev/zero").exists():
        pytest.skip("this system has no /dev/zero")
    path.symlink_to("/dev/zero")


def _hole(path: Path) -> None:
    if os.name == "nt":
        pytest.skip("files of this system have no holes unless they are marked")
    with path.open("wb") as file:
        file.truncate(20 << 30)


def _folder(path: Path) -> None:
    path.mkdir()


ODD: dict[str, Callable[[Path], None]] = {"pipe": _pipe, "device": _device, "hole": _hole, "folder": _folder}
SOME = ["hole", *map(weekly, ("pipe", "device", "folder"))]


@contextmanager
def soon_and_small() -> Iterator[None]:
    """Fails what takes longer than `_SECONDS`, or more than `_MEMORY` bytes above what was needed before."""
    if os.name == "nt":
        yield
        return
    import resource

    def late(*_: object) -> None:
        raise TimeoutError("still running")

    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before < _MEMORY


def config(folder: Path, more: str = "", name: str = "c.toml") -> Path:
    file = folder.parent / name
    file.write_text(_CONFIG.format(folder=f"'{folder}'", more=more), encoding="utf-8")
    return file


def told(code: int, out: str, errors: str, name: str) -> None:
    """Nothing failed by itself: the file is named, or it is taken for one that is not there."""
    assert "Traceback" not in out + errors
    assert "still running" not in out + errors
    assert code in (0, 1, 2)
    assert name in out + errors, (code, out, errors)


@pytest.mark.long
@pytest.mark.parametrize("odd", SOME)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("odd.png", ("analyze", "DATA")),
        ("odd.png", ("analyze", "DATA", "--decode")),
        ("odd.png", ("plan", "CONFIG")),
        ("odd.png", ("doctor", "CONFIG")),
        ("odd.png", ("simulate", "FILE")),
        ("odd.webm", ("analyze", "FILE")),
        ("odd.csv", ("compare", "FILE")),
        ("odd.json", ("compare", "FILE")),
        ("odd.parquet", ("compare", "FILE")),
        ("odd.csv", ("buckets", "make", "FILE")),
        ("odd.txt", ("analyze", "FILE")),
        ("odd.tar", ("analyze", "FILE")),
        ("odd.toml", ("plan", "FILE")),
        ("odd.json", ("doctor", "FILE")),
        ("odd.json", ("simulate", "576x768", "--bucket-config", "FILE")),
        ("odd.parquet", ("analyze", "DATA", "--cache", "FILE")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_files_that_a_command_names(
    command_line: Command, folder: Path, odd: str, name: str, arguments: tuple[str, ...]
) -> None:
    in_folder = name == "odd.png"
    if odd == "folder" and (in_folder or name in ("odd.txt", "odd.tar", "odd.webm")):
        pytest.skip("a folder is a source itself, and in one a folder that is not looked into")
    file = (folder if in_folder else folder.parent) / name
    ODD[odd](file)
    words = {"FILE": file, "DATA": folder, "CONFIG": config(folder), "OUT": folder.parent / "out"}
    with soon_and_small():
        code, out, errors = command_line(*(words.get(word, word) for word in arguments))
    told(code, out, errors, name)


@pytest.mark.long
@pytest.mark.parametrize("odd", SOME)
@pytest.mark.parametrize("command", [("plan",), ("doctor", "--quick"), ("analyze", "--config")])
@pytest.mark.parametrize("kind", ["caption", "metadata", "sizes", "focus", "beside", "bbox"])
def test_files_that_a_config_leads_to(
    command_line: Command, folder: Path, odd: str, command: tuple[str, ...], kind: str
) -> None:
    for image in folder.glob("*.png"):
        image.with_suffix(".txt").write_text("a caption", encoding="utf-8")
    where, more = {
        "caption": (folder / "1.txt", ""),
        "metadata": (folder.parent / "list.json", f"metadata_file = '{folder.parent / 'list.json'}'"),
        "sizes": (folder / "metadata_cache.json", "cache_info = true"),
        "focus": (folder.parent / "f.jsonl", f"[kohya_bucket]\nfocus = '{folder.parent / 'f.jsonl'}'"),
        "beside": (folder / "1.focus.json", "[kohya_bucket]\nfocus = 'beside'"),
        "bbox": (folder / "1.bbox", "[kohya_bucket]\nfocus = 'beside'"),
    }[kind]
    where.unlink(missing_ok=True)
    ODD[odd](where)
    with soon_and_small():
        code, out, errors = command_line(*command, config(folder, more))
    seen_as_absent = (kind == "caption" and odd != "hole") or (kind == "sizes" and odd != "hole")
    unread = kind == "caption" and command[0] == "analyze"
    told(code, out, errors, "" if unread or seen_as_absent else where.name)
    if kind == "caption" and odd == "hole" and not unread:
        assert "21,474,836,480 bytes" in out
    if kind == "caption" and odd != "hole" and not unread:
        assert "1 of 3 images has no '.txt' file" in out


@pytest.mark.long
@pytest.mark.parametrize("odd", SOME)
@pytest.mark.parametrize("kind", ["store.json", "manifest", "shard", "source"])
@pytest.mark.parametrize(
    "command",
    [("status",), ("verify",), ("prune",), ("prune", "--damaged"), ("pack",), ("export", "--arch", "sdxl")],
    ids=" ".join,
)
def test_files_of_a_store(command_line: Command, tmp_path: Path, odd: str, kind: str, command: tuple[str, ...]) -> None:
    pytest.importorskip("safetensors")
    sys.path.insert(0, str(Path(__file__).parents[1] / "latents"))
    try:
        from latent_helpers import fill
    finally:
        del sys.path[0]
    store, images = tmp_path / "store", tmp_path / "images"
    from kohya_bucket.latents.store.latent_store import LatentStore
    from kohya_bucket.latents.store.writer import write_manifest

    fill(store, ["a.png", "b.png"])
    write_manifest(LatentStore(store))
    images.mkdir()
    place, *_ = {
        "store.json": lambda: [store / "store.json"],
        "manifest": lambda: list(store.glob("manifest-*.parquet")),
        "shard": lambda: list(store.rglob("*.safetensors")),
        "source": lambda: [images / "a.png"],
    }[kind]()
    place.unlink(missing_ok=True)
    ODD[odd](place)
    before = {path for path in store.rglob("*.safetensors") if path != place}
    more = {"export": ["--image-dir", images, "--output", tmp_path / "out"], "status": ["--image-dir", images]}
    with soon_and_small():
        code, out, errors = command_line("cache", command[0], store, *command[1:], *more.get(command[0], ()))
    told(code, out, errors, "")
    assert {path for path in store.rglob("*.safetensors") if path != place} >= before or command[0] == "pack"
    assert os.path.lexists(place) or command == ("prune", "--damaged") or command[0] in ("pack", "prune")


@pytest.mark.parametrize("odd", ODD)
def test_npz_to_import(command_line: Command, folder: Path, odd: str) -> None:
    ODD[odd](folder / "1_0400x0400_sdxl.npz")
    with soon_and_small():
        code, out, errors = command_line(
            "cache", "import", folder, "--arch", "sdxl", "--output", folder.parent / "store"
        )
    told(code, out, errors, "1_0400x0400_sdxl.npz" if odd != "folder" else "")
