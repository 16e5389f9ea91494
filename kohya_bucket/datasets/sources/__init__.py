"""Where images come from: files, Hugging Face data sets, tar shards. Each can name sizes without decoding."""

from kohya_bucket.datasets.sources.protocol import ImageSource, SourceSizes

__all__ = ["ImageSource", "SourceSizes"]
