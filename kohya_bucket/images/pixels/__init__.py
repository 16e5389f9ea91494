"""Pixels as sd-scripts trains them."""
