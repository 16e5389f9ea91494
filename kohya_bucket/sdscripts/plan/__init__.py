"""What training with a config will be, and which latents it needs."""
