"""The rules: what decides which bucket an image gets. `registry` makes one from its name."""
