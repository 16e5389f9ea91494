"""Buckets without enlarging: the image's own size, reduced to the area, floored to the step."""
