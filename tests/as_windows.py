"""Tests run on Linux with what Windows refuses, except for slow ones and those marked `posix`, which Windows skips."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.windows import refusals


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.name == "nt" and (mark := item.get_closest_marker("posix")):
        pytest.skip(mark.args[0])


@pytest.fixture(autouse=True)
def _as_windows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    is_other = not request.path.is_relative_to(Path(__file__).parent)  # of real trainers
    # slow ones start many processes
    free = any(request.node.get_closest_marker(name) for name in ("posix", "slow", "weekly"))
    if sys.platform != "linux" or is_other or free:
        yield
        return
    folder = str(tmp_path_factory.getbasetemp())
    monkeypatch.setenv(refusals.FOLDER, folder)
    monkeypatch.setenv(refusals.ROOT, str(os.getpid()))
    paths = [str(Path(refusals.__file__).parent / "child"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    undo = refusals.install(folder)
    yield
    undo()
