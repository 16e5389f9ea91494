"""Dataset configs of musubi-tuner: what they say, what is wrong with them, and the items that they name."""

from kohya_bucket.musubi.config.model import ClipKeys, DatasetKeys, ImageKeys
from kohya_bucket.musubi.config.read import MusubiConfig, is_musubi, read_config

__all__ = ["ClipKeys", "DatasetKeys", "ImageKeys", "MusubiConfig", "is_musubi", "read_config"]
