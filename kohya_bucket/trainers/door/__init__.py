"""One plan behind a trainer's own loader: what every door needs, without a trainer's name."""
