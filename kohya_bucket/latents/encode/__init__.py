"""Encoding a dataset once, on every device there is."""
