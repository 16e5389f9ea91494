"""Clips: how many frames they have, of which size, at which rate."""

from kohya_bucket.images.clips.clip_scan import ClipScan, list_clips, read_clips

__all__ = ["ClipScan", "list_clips", "read_clips"]
