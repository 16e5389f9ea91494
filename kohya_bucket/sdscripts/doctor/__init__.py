"""What keeps a training from starting, or would end it later: looked up before it does. Nothing on disk is changed."""

from kohya_bucket.adapter.section import Section

__all__ = ["Section"]
