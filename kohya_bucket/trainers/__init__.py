"""The plan in a trainer's own loader: what every trainer needs, and a door for each trainer."""
