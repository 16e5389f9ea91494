"""Every place of sd-scripts that the adapter takes hold of, by subject: what must be there, and what stands in."""

from kohya_bucket.sdscripts.seams.batches import BATCHES
from kohya_bucket.sdscripts.seams.buckets import BUCKETS
from kohya_bucket.sdscripts.seams.caching import CACHING
from kohya_bucket.sdscripts.seams.config import CONFIG
from kohya_bucket.sdscripts.seams.loading import LOADING
from kohya_bucket.sdscripts.seams.objects import OBJECTS
from kohya_bucket.sdscripts.seams.resuming import RESUMING
from kohya_bucket.sdscripts.seams.text_caching import TEXT_CACHING

__all__ = ["SUBJECTS"]

SUBJECTS = (OBJECTS, BUCKETS, BATCHES, CONFIG, LOADING, CACHING, TEXT_CACHING, RESUMING)
