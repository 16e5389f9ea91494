"""Clips in buckets of width, height and frames: how many frames a clip has, which of them make an item, and where."""

from kohya_bucket.buckets.clips.frame_grid import FrameGrid
from kohya_bucket.buckets.clips.frame_rate import frames_at_rate
from kohya_bucket.buckets.clips.placement import ClipPlacement
from kohya_bucket.buckets.clips.rule import ClipBuckets
from kohya_bucket.buckets.clips.spans import Spans, take_spans

__all__ = ["ClipBuckets", "ClipPlacement", "FrameGrid", "Spans", "frames_at_rate", "take_spans"]
