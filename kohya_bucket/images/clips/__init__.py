"""Clips: how many frames they have, of which size, at which rate."""

from kohya_bucket.images.clips.clip_scan import ClipScan, read_clips
from kohya_bucket.images.clips.endings import VIDEO_EXTENSIONS, is_video, list_clips

__all__ = ["VIDEO_EXTENSIONS", "ClipScan", "is_video", "list_clips", "read_clips"]
