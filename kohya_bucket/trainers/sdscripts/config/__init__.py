"""Dataset configs of sd-scripts: read, resolved and checked without sd-scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import importer

if TYPE_CHECKING:
    from kohya_bucket.trainers.door.findings import Finding, Severity
    from kohya_bucket.trainers.sdscripts.config.keys import DatasetKind, SubsetConfig
    from kohya_bucket.trainers.sdscripts.config.model import DatasetTable
    from kohya_bucket.trainers.sdscripts.config.read import Config, ReadDataset, read_config, read_folders
    from kohya_bucket.trainers.sdscripts.config.releases import NEWEST, Feature, Release
else:
    _HOMES = {
        "kohya_bucket.trainers.door.findings": ["Finding", "Severity"],
        "kohya_bucket.trainers.sdscripts.config.keys": ["DatasetKind", "SubsetConfig"],
        "kohya_bucket.trainers.sdscripts.config.model": ["DatasetTable"],
        "kohya_bucket.trainers.sdscripts.config.read": ["Config", "ReadDataset", "read_config", "read_folders"],
        "kohya_bucket.trainers.sdscripts.config.releases": ["NEWEST", "Feature", "Release"],
    }
    __getattr__ = importer(__name__, _HOMES)

__all__ = [
    "NEWEST", "Config", "DatasetKind", "DatasetTable", "Feature", "Finding", "ReadDataset", "Release", "Severity",
    "SubsetConfig", "read_config", "read_folders",
]  # fmt: skip
