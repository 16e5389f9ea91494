"""What else the published sources have, restated: nothing else in this package uses it."""
