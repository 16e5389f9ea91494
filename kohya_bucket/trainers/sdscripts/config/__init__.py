"""Dataset configs of sd-scripts: read, resolved and checked without sd-scripts."""

from kohya_bucket.trainers.door.findings import Finding, Severity
from kohya_bucket.trainers.sdscripts.config.keys import DatasetKind, SubsetConfig
from kohya_bucket.trainers.sdscripts.config.read import Config, ReadDataset, read_config, read_folders, read_images
from kohya_bucket.trainers.sdscripts.config.releases import NEWEST, Feature, Release

__all__ = [
    "NEWEST", "Config", "DatasetKind", "Feature", "Finding", "ReadDataset", "Release", "Severity",
    "SubsetConfig", "read_config", "read_folders", "read_images",
]  # fmt: skip
