"""Tar shards: what lies where in them, and lists of them."""
