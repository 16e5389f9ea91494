"""The adapter: this package's plans behind ai-toolkit's own datasets."""
