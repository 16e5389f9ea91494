"""Caches of latents and text-encoder outputs, behind sd-scripts' own caching."""
