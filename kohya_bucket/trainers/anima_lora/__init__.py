"""The adapter: this package's plans behind anima_lora's own datasets."""
