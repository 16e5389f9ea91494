"""The adapter: this package's plans behind musubi-tuner's own classes."""
