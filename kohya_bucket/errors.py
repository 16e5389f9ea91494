"""Errors that a user can cause. Each says what was wrong, with the value, why it matters, and what to do."""

from __future__ import annotations

__all__ = [
    "BucketSettingsError",
    "ConfigError",
    "InvalidBucketError",
    "KohyaBucketError",
    "LatentStoreError",
    "PlanError",
    "ResumeError",
]


class KohyaBucketError(ValueError):
    """Base of every error that is caused by input, not by a defect in this package."""


class BucketSettingsError(KohyaBucketError):
    """Settings from which no usable bucket set follows."""


class InvalidBucketError(KohyaBucketError):
    """A bucket or bucket set that cannot be trained: non-positive, duplicate, empty, not a multiple."""


class ConfigError(KohyaBucketError):
    """A config file that cannot be read or holds a setting that does not exist there."""


class PlanError(KohyaBucketError):
    """Settings from which no epoch can be planned: a batch size of 0, a policy without what it needs."""


class ResumeError(PlanError):
    """A saved position that belongs to other data or other settings than those at hand."""


class LatentStoreError(KohyaBucketError):
    """A latent store or cache file that cannot be read, written or trusted."""
