"""The image files of a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["list_images"]


def list_images(directory: str, extensions: Sequence[str]) -> list[str]:
    """The image files in one folder, sorted: what a glob per extension finds, with one look into the folder.

    As with a glob, names that begin with a dot are left out, and letter case counts where the system's paths have it.
    """
    folder = os.path.split(os.path.join(directory, "*"))[0]  # noqa: PTH118
    endings = tuple({os.path.normcase(extension) for extension in extensions})
    try:
        names = os.listdir(folder or os.curdir)  # noqa: PTH208
    except OSError:
        return []
    found = [name for name in names if not name.startswith(".") and os.path.normcase(name).endswith(endings)]
    return sorted(os.path.join(folder, name) for name in found)  # noqa: PTH118
