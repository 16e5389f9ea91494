"""One plan behind somebody else's loader: what any trainer's door needs, and no trainer's name."""
