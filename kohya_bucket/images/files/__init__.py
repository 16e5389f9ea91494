"""Image files: which there are, their paths, and their bytes, wherever they lie."""
