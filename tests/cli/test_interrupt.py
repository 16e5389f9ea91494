"""Ctrl-C on a slow disk, as a terminal sends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from kohya_bucket.cli import group
from tests.pictures import make_pictures

ROOT = Path(__file__).parents[2]
SLOW = """
import itertools, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background hands down "ignore"
real = os.open
opened = itertools.count()
def slow(path, *rest, **options):
    if str(path).endswith(".png"):
        time.sleep(0.02 if next(opened) < 200 else 3)  # the scan cannot end before the signal, however late it comes
        os.write(1, b"opened\\n")
    return real(path, *rest, **options)
os.open = slow
from kohya_bucket.cli import main
main()
"""


def interrupted(program: str, *arguments: object, after: tuple[str, int], cwd: Path = ROOT) -> list[str]:
    """What a program says that is interrupted once it has printed a line so many times."""
    child = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    line, times = after
    for _ in range(times):
        assert child.stdout.readline().strip() == line
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=300)
    assert child.returncode == 130, errors
    return errors.splitlines()


@pytest.mark.posix("sends a POSIX signal")
@pytest.mark.weekly
def test_sizes_build_keeps_what_it_has_read(tmp_path: Path) -> None:
    from kohya_bucket.images import MetadataCache

    data = tmp_path / "data"
    make_pictures(data, [(8 + i % 5, 9) for i in range(400)])
    target = tmp_path / "c.parquet"
    said = "\n".join(interrupted(SLOW, "cache", "sizes", data, "--output", target, after=("opened", 100)))
    assert "continue with --refresh" in said
    assert "Traceback" not in said
    kept = MetadataCache.load(target)
    assert 50 <= len(kept) < 400
    assert (kept.sizes[:, 1] == 9).all()


@pytest.mark.long
@pytest.mark.posix("sends a POSIX signal")
@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "c.toml", "--json"),
        pytest.param(("compare", "data"), marks=pytest.mark.slow),
        pytest.param(("analyze", "data"), marks=pytest.mark.slow),
    ],
)
def test_a_command_says_in_one_line_that_it_was_interrupted(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    make_pictures(tmp_path / "data", [(300 + i, 300) for i in range(210)])
    config = (
        "[general]\nenable_bucket = true\n[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'data'\n"
    )
    (tmp_path / "c.toml").write_text(config, encoding="utf-8")
    (line,) = interrupted(SLOW, *arguments, after=("opened", 20), cwd=tmp_path)
    assert line.startswith(f"kohya-bucket {arguments[0]}: interrupted after")
    assert line.endswith("of 210 files")


IMPORTING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("importing", flush=True)
            time.sleep(300)
sys.meta_path.insert(0, Slow())
from kohya_bucket.cli import main
sys.argv = ["kohya-bucket", "simulate", "576x768"]
main()
"""


@pytest.mark.long
@pytest.mark.posix("sends a POSIX signal")
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("typer", "kohya-bucket: interrupted"),
        ("kohya_bucket.cli.commands.simulate", "kohya-bucket simulate: interrupted"),
        ("kohya_bucket.reports.explain", "kohya-bucket simulate: interrupted"),
    ],
)
def test_an_interrupt_while_a_command_is_imported_is_one_line(module: str, line: str) -> None:
    assert interrupted(IMPORTING.format(module=module), after=("importing", 1)) == [line]


def test_an_interrupt_inside_pythons_own_locks_is_one_too(monkeypatch, capsys):
    def start_a_thread(*_):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr(group.PlainGroup, "invoke", start_a_thread, raising=False)
    with pytest.raises(typer.Exit) as ended:
        group._Commands().invoke(SimpleNamespace(invoked_subcommand="compare"))
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "kohya-bucket compare: interrupted\n"
