"""The size of each image file, from its header, and a cache of them.

Names are imported when they are first used: processes that help with a scan shall start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import lazy_names

if TYPE_CHECKING:
    from kohya_bucket.images.formats import IMAGE_EXTENSIONS as IMAGE_EXTENSIONS
    from kohya_bucket.images.formats import ImageFormat as ImageFormat
    from kohya_bucket.images.listing import list_images as list_images
    from kohya_bucket.images.metadata_cache import Changes as Changes
    from kohya_bucket.images.metadata_cache import MetadataCache as MetadataCache
    from kohya_bucket.images.metadata_cache import MetadataRow as MetadataRow
    from kohya_bucket.images.sizes import ScanInterrupted as ScanInterrupted
    from kohya_bucket.images.sizes import SizeScan as SizeScan
    from kohya_bucket.images.sizes import read_sizes as read_sizes
    from kohya_bucket.images.text_column import TextColumn as TextColumn
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {
        "formats": "IMAGE_EXTENSIONS ImageFormat",
        "listing": "list_images",
        "metadata_cache": "Changes MetadataCache MetadataRow",
        "sizes": "ScanInterrupted SizeScan read_sizes",
        "text_column": "TextColumn",
    })  # fmt: skip
