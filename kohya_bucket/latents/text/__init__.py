"""Outputs of text encoders: each caption's once, in the type that the encoder gave, and back to the last bit."""
