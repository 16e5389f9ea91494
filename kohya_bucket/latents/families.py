"""Model families: what their autoencoders make of an image, and how a file of one is told.

Source: `scaling_factor` and `shift_factor` in the configs of diffusers' autoencoders, and their latents' shapes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFamily:
    """The autoencoder of one model family.

    Attributes:
        name: its name here, in stores and in `--arch`.
        title: its name for people.
        stride: pixels per latent in each side.
        channels: latent channels.
        scale_factor, shift_factor: training takes `(raw - shift_factor) * scale_factor`.
        per_channel: each channel has a scale of its own, which only the autoencoder knows.
        autoencoder: diffusers' class of it.
        checkpoint_key: how a key begins that only a whole checkpoint of this family has; "" where none is known.
    """

    name: str
    title: str
    stride: int
    channels: int
    scale_factor: float = 1.0
    shift_factor: float = 0.0
    per_channel: bool = False
    autoencoder: str = "AutoencoderKL"
    checkpoint_key: str = ""

    @property
    def values_per_pixel(self) -> float:
        """Numbers of a latent per pixel of its image."""
        return self.channels / self.stride**2

    def shape(self, bucket_size: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the latents of a bucket (width, height): [C, h, w]."""
        return self.channels, bucket_size[1] // self.stride, bucket_size[0] // self.stride


MODEL_FAMILIES = {
    f.name: f
    for f in (
        ModelFamily("sd", "SD 1.5", 8, 4, 0.18215, checkpoint_key="cond_stage_model."),
        ModelFamily("sdxl", "SDXL", 8, 4, 0.13025, checkpoint_key="conditioner.embedders.1."),
        ModelFamily("sd3", "SD3", 8, 16, 1.5305, 0.0609, checkpoint_key="model.diffusion_model.joint_blocks."),
        ModelFamily("flux", "Flux", 8, 16, 0.3611, 0.1159, checkpoint_key="model.diffusion_model.double_blocks."),
        ModelFamily("lumina", "Lumina", 8, 16, 0.3611, 0.1159),
        ModelFamily("hunyuan_image", "HunyuanImage", 32, 64, 0.75289, autoencoder="AutoencoderKLHunyuanImage"),
        ModelFamily("anima", "Anima", 8, 16, per_channel=True, autoencoder="AutoencoderKLQwenImage"),
    )
}
