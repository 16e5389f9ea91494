"""PyTorch datasets and samplers."""
