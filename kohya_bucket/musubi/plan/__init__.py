"""What training with a musubi-tuner config will be."""
