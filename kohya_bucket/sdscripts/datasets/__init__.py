"""sd-scripts' data sets, with this package's placements and plans in them."""
