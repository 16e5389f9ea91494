"""Encoding a data set once, on every device there is."""
