"""Dataset configs of sd-scripts: read, resolved and checked without sd-scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.lazy import importer

if TYPE_CHECKING:
    from kohya_bucket.adapter.findings import Finding, Findings, Severity
    from kohya_bucket.sdscripts.config.keys import NEWEST, Change, DatasetConfig, Kind, Release, SubsetConfig, Supports
    from kohya_bucket.sdscripts.config.model import DatasetTable
    from kohya_bucket.sdscripts.config.read import Config, ReadDataset, read_config, read_folders
else:
    __getattr__ = importer(
        __name__,
        {
            "kohya_bucket.adapter.findings": ["Finding", "Findings", "Severity"],
            "kohya_bucket.sdscripts.config.keys": [
                "NEWEST",
                "Change",
                "DatasetConfig",
                "Kind",
                "Release",
                "SubsetConfig",
                "Supports",
            ],
            "kohya_bucket.sdscripts.config.model": ["DatasetTable"],
            "kohya_bucket.sdscripts.config.read": ["Config", "ReadDataset", "read_config", "read_folders"],
        },
    )

__all__ = [
    "NEWEST",
    "Change",
    "Config",
    "DatasetConfig",
    "DatasetTable",
    "Finding",
    "Findings",
    "Kind",
    "ReadDataset",
    "Release",
    "Severity",
    "SubsetConfig",
    "Supports",
    "read_config",
    "read_folders",
]
