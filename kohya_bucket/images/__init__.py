"""The size of each image file, from its header, and a cache of them."""

from kohya_bucket.images.cache import Changes, MetadataCache, MetadataRow
from kohya_bucket.images.formats import IMAGE_EXTENSIONS, ImageFormat
from kohya_bucket.images.header import Header, read_size
from kohya_bucket.images.listing import list_images
from kohya_bucket.images.scan import ScanInterrupted, SizeScan, read_sizes
from kohya_bucket.images.text_column import TextColumn

__all__ = [
    "IMAGE_EXTENSIONS",
    "Changes",
    "Header",
    "ImageFormat",
    "MetadataCache",
    "MetadataRow",
    "ScanInterrupted",
    "SizeScan",
    "TextColumn",
    "list_images",
    "read_size",
    "read_sizes",
]
