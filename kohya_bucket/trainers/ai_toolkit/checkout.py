"""A checkout of ai-toolkit."""

from __future__ import annotations

from pathlib import Path


def is_checkout(folder: Path) -> bool:
    """Whether ai-toolkit lies in `folder`."""
    return (folder / "toolkit" / "data_loader.py").is_file() and (folder / "run.py").is_file()
