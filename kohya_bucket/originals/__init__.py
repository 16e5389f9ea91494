"""What the published sources have besides, restated: nothing else in this package uses it."""
