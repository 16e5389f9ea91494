"""The size of each image file, from its header, and a cache of them.

Names are imported when they are first used: processes that help with a scan shall start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import importer

if TYPE_CHECKING:
    from kohya_bucket.images.formats import IMAGE_EXTENSIONS, ImageFormat
    from kohya_bucket.images.listing import list_images
    from kohya_bucket.images.metadata_cache import Changes, MetadataCache, MetadataRow
    from kohya_bucket.images.sizes import ScanInterrupted, SizeScan, read_sizes
    from kohya_bucket.images.text_column import TextColumn
else:
    __getattr__ = importer(
        __name__,
        {
            "kohya_bucket.images.metadata_cache": ["Changes", "MetadataCache", "MetadataRow"],
            "kohya_bucket.images.listing": ["list_images"],
            "kohya_bucket.images.formats": ["IMAGE_EXTENSIONS", "ImageFormat"],
            "kohya_bucket.images.sizes": ["ScanInterrupted", "SizeScan", "read_sizes"],
            "kohya_bucket.images.text_column": ["TextColumn"],
        },
    )

__all__ = [
    "IMAGE_EXTENSIONS",
    "Changes",
    "ImageFormat",
    "MetadataCache",
    "MetadataRow",
    "ScanInterrupted",
    "SizeScan",
    "TextColumn",
    "list_images",
    "read_sizes",
]


def __dir__() -> list[str]:
    return list(__all__)
