"""The VAE that a command is given, loaded."""

from __future__ import annotations

from typing import Any

from kohya_bucket.errors import KohyaBucketError


def load_vae(vae: str, **settings: Any) -> Any:
    """An encoder from a hub name, a folder or a .safetensors file; see `diffusers_vae.load_encoder`.

    Raises:
        KohyaBucketError: what is needed to load it is not installed, or it cannot be loaded.
    """
    try:
        from kohya_bucket.latents.diffusers_vae import load_encoder

        return load_encoder(vae, **settings)
    except ModuleNotFoundError as missing:
        raise KohyaBucketError(
            f"a VAE needs {missing.name}, which is not installed: pip install 'kohya-bucket[train]'"
        ) from missing
