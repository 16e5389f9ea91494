"""The command line as a user has it: with its exit codes, and a mistake in one line."""

import re
from collections.abc import Callable

import pytest

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs `kohya-bucket ARGUMENTS` in this process; gives its exit code, output and errors."""
    from kohya_bucket.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["kohya-bucket", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = int(ended.value.code or 0)
        del ended  # whose traceback has this frame, and so all files that the command mapped
        return (code, *capfd.readouterr())

    return run


def encoded_counts(output: str) -> tuple[int, ...]:
    """How many `precompute` encoded, found current and could not encode (of captions it counts the first two)."""
    found = re.search(r"(\d+) encoded, (\d+) were current(?:, (\d+) failed)?", output)
    assert found, output
    return tuple(int(number) for number in found.groups() if number is not None)
