"""The images that cannot be read, of a config whose mistakes keep it from being planned."""

from __future__ import annotations

import os

from kohya_bucket.adapter.kept_sizes import scan_sizes
from kohya_bucket.images.parallel import Progress
from kohya_bucket.sdscripts.config import Config
from kohya_bucket.texts import counted, some

__all__ = ["name_unreadable"]


def name_unreadable(config: Config, progress: Progress | None = None) -> set[str]:
    """Add them to the config's findings, so that one run tells of them and of the mistakes; returns their paths."""
    # What metadata names and is not there has a finding of its own; a link to nothing is one of the folder's files.
    paths = list(dict.fromkeys(path for dataset in config.datasets for path in dataset.images.paths))
    bad = [(path, why) for _, path, why in scan_sizes(paths, "off", progress).failures if os.path.lexists(path)]
    if bad:
        names = [f"{path}: {why}" for path, why in bad]
        message = f"{counted(len(bad), 'image')} cannot be read ({some(names, 1)})"
        config.findings.warning("unreadable-image", "", message, "repair or remove", names)
    return {path for path, _ in bad}
