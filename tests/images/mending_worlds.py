"""Random folders for `fix`, what happens to them meanwhile, and what is there: bytes, links, times, modes, owners."""

import builtins
import errno
import functools
import hashlib
import io
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

Snapshot = dict[str, tuple[Any, ...]]
_PICTURES = ("plain.png", "plain.jpg", "turned.jpg", "turned.png", "turned.webp", "deep.png", "moves.gif", "cmyk.tif",
             "wrong.png", "case.Jpg", "cut.jpg", "none.png", "tiny.webp")  # fmt: skip
_TEXTS = [b"a plain text", "café".encode("cp1252"), "猫".encode("utf-16"), "\ufeffred".encode(), b"\x81\x8d\x81"]
_STEMS = ["a", "b", "c c", "-d", "e.e", "$(f)", "Jörg", "猫", "g" * 60]
_ODD = ["h\nh", os.fsdecode(b"i\xff"), "j\\j", "k\x1b[31m", "l" * 247, "m:m"]  # which Windows does not have


@functools.cache
def pictures() -> dict[str, bytes]:
    """One file of each kind that `fix` treats, and some that it leaves."""
    draw, out = np.random.default_rng(0), dict[str, bytes]()
    exif, text = Image.Exif(), PngInfo()
    exif[0x112] = 6
    text.add_text("parameters", "a cat, Steps: 20")
    for name in _PICTURES:
        small = draw.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((72, 20) if "tiny" in name else (96, 72))
        kind = {"wrong.png": "JPEG", "case.Jpg": "JPEG", "cut.jpg": "JPEG"}.get(name, Path(name).suffix[1:].upper())
        if "deep" in name:
            image = Image.fromarray((np.asarray(image.convert("L")).astype(np.uint16) << 8) | 99)
        if "cmyk" in name:
            image = image.convert("CMYK")
        options: dict[str, Any] = {"exif": exif} if "turned" in name else {}
        file = io.BytesIO()
        image.save(
            file, {"JPG": "JPEG", "TIF": "TIFF"}.get(kind, kind), pnginfo=text if kind == "PNG" else None, **options
        )
        out[name] = file.getvalue()
    out["cut.jpg"] = out["cut.jpg"][: len(out["cut.jpg"]) // 2]
    out["none.png"] = b"\x89PNG\r\n\x1a\n" + bytes(99)
    return out


def can_mount() -> bool:
    """Whether this process may mount file systems."""
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("mount") is not None


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(base: Path, draw: random.Random, *, odd: bool, links: bool) -> None:
    """Put files into `base/data` and two folders in it, and into `base/pool`, which is another's.

    Args:
        odd: with names that only POSIX has, owners and modes.
        links: with symbolic and hard links of all kinds.
    """
    data, pool = base / "data", base / "pool"
    inside = [data, data / "sub", data / "10_x" / "y"]
    for folder in (*inside, pool):
        folder.mkdir(parents=True, exist_ok=True)
    stems = _STEMS + _ODD * odd
    for folder in (*inside, pool):
        for _ in range(draw.randrange(2, 7)):
            name, content = draw.choice(list(pictures().items()))
            path = folder / (draw.choice(stems) + Path(name).suffix)
            path.write_bytes(content + draw.choice([b"", b"", bytes([draw.randrange(256)])]))
            if draw.random() < 0.6:
                path.with_suffix(draw.choice([".txt", ".caption"])).write_bytes(draw.choice(_TEXTS))
    (data / "notes.json").write_text("{}")
    if links:
        for _ in range(draw.randrange(1, 7)):
            _link(base, draw, inside)
    for path in sorted(base.rglob("*")):
        if path.is_file() and not path.is_symlink():
            if odd and draw.random() < 0.3:
                path.chmod(draw.choice([0o644, 0o600, 0o444, 0o755]))
                if os.geteuid() == 0:
                    os.chown(path, draw.choice([0, 1000, 4242]), draw.choice([0, 1000]))
            moment = 1_500_000_000_000_000_000 + draw.randrange(10**17)
            os.utime(path, ns=(moment, moment))


def _link(base: Path, draw: random.Random, inside: list[Path]) -> None:
    files = [path for path in sorted([*base.glob("data/**/*"), *base.glob("pool/*")]) if path.is_file()]
    target = draw.choice(files)
    folder = draw.choice([*inside, base / "pool"] if draw.random() < 0.9 else [base])
    path = folder / (draw.choice(_STEMS) + draw.choice(["", "2"]) + target.suffix)
    if os.path.lexists(path) or os.path.lexists(folder / "linked"):
        return
    kind = draw.randrange(8)
    if kind == 0:
        os.link(target, path) if target.stat().st_dev == folder.stat().st_dev else None
    elif kind == 1:
        path.symlink_to(base / "nowhere.png")
    elif kind == 2:
        (folder / "linked").symlink_to(draw.choice([base / "pool", Path("../pool"), base / "data" / "sub", base]))
    elif kind == 3:
        path.symlink_to(path.name)  # a circle
    elif kind == 4:
        path.symlink_to(target.absolute())
    else:
        path.symlink_to(os.path.relpath(target, folder))


def seen(base: Path) -> Snapshot:
    """All below a folder, by relative path: what it is, mode and owners; of links where they lead; of files bytes, time
    of change, and which file it is."""
    names = [Path(here) / name for here, folders, files in os.walk(base) for name in folders + files]
    return {os.path.relpath(path, base): _one(path) for path in names}


def is_aside(name: str) -> bool:
    """Whether it lies in the place of what is set aside."""
    return ".set-aside" in Path(name).parts


def without_aside(there: Snapshot, named: Collection[str] = ()) -> Snapshot:
    """The rest, but for what is named; which file it is by the first of its names."""
    first = dict[Any, str]()
    rest = {name: what for name, what in sorted(there.items()) if not is_aside(name) and name not in named}
    return {name: (*what[:4], first.setdefault(what[4:] or name, name)) for name, what in rest.items()}


def _one(path: Path) -> tuple[Any, ...]:
    status = path.lstat()
    rights = (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
    if stat.S_ISLNK(status.st_mode):
        return "link", str(path.readlink()), status.st_mtime_ns, rights
    if stat.S_ISDIR(status.st_mode):
        return "folder", rights
    content = hashlib.sha1(path.read_bytes()).hexdigest()
    return "file", content, status.st_mtime_ns, rights, (status.st_dev, status.st_ino)


class Dead(BaseException):
    """The process was killed: whatever it still does to files is refused with this."""


@dataclass
class Calls:
    """The calls that change files: counted, refused outside `root`, and something happens before one of them.

    Attributes:
        at: the number of that call; 0 for none.
        event: what happens before it.
        strayed: what was asked to be changed outside `root`, and is none of `allowed`.
    """

    root: Path
    at: int = 0
    event: Callable[[], None] = lambda: None
    count: int = 0
    dead: bool = False
    quiet: bool = False
    strayed: list[str] = field(default_factory=list)

    def die(self) -> None:
        self.dead = True
        raise Dead

    def fail(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def before(self, *paths: Any) -> None:
        if self.quiet:
            return
        if self.dead:
            raise Dead
        for path in paths:
            real = Path(path).parent.resolve() / Path(path).name
            if self.root not in real.parents:
                self.strayed.append(str(real))
        self.count += 1
        if self.count == self.at:
            self.quiet = True
            try:
                self.event()
            finally:
                self.quiet = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            for name, paths in _CHANGING.items():
                if hasattr(os, name):
                    patched.setattr(os, name, self._around(getattr(os, name), paths))
            opened, io_opened, os_opened = builtins.open, io.open, os.open

            def open_(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
                if set(mode) & set("wax+"):
                    self.before(file)
                return opened(file, mode, *args, **more)

            def os_open(path: Any, flags: int, *args: Any, **more: Any) -> Any:
                if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                    self.before(path)
                return os_opened(path, flags, *args, **more)

            assert io_opened is opened
            patched.setattr(builtins, "open", open_)
            patched.setattr(io, "open", open_)
            patched.setattr(os, "open", os_open)
            yield

    def _around(self, real: Callable[..., Any], paths: int) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.before(*args[:paths])
            return real(*args, **more)

        return call


_CHANGING = {"rename": 2, "replace": 2, "link": 2, "symlink": 2, "unlink": 1, "remove": 1, "mkdir": 1, "rmdir": 1,
             "chmod": 1, "chown": 1, "utime": 1, "truncate": 1}  # fmt: skip
