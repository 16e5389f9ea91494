"""Encoding on a Ray cluster: one process hands out pieces of work, actors that hold a model do them."""
