"""The stored size of an image, from its header."""
