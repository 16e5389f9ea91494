"""Where a table of results comes from."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["commit"]


def commit() -> str:
    """The commit of this checkout, abbreviated."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
