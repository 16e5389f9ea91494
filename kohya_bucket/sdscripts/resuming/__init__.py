"""A resumed run of sd-scripts' trainers, at the exact image."""
