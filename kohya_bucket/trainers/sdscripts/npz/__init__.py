"""sd-scripts' own latent caches, one npz beside each image."""
