"""Bucket sets and sizes that are computed from the images."""
