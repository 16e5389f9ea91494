"""PyTorch data sets and samplers."""
