"""What encodes: the protocol of encoders, and diffusers' autoencoders."""
