"""How many tokens transformers make of an image or a clip, and what those cost.

Source: strides, patches and widths in the published code and configs of each model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class TokenGrid:
    """How a transformer cuts a latent image or clip into tokens, and what it spends on them.

    Attributes:
        width: channels of a token in its blocks.
        side: pixels of a token in each side: of the autoencoder's latents times those of a patch.
        frame_stride: frames of a latent frame after the first; 1 for models of images.
    """

    width: int
    side: int = 16
    frame_stride: int = 1

    def tokens(self, sizes: npt.ArrayLike, frames: npt.ArrayLike = 1) -> npt.NDArray[np.int64]:
        """[K] tokens of one image or clip of each bucket; a partial patch counts as one.

        Args:
            sizes: [K, 2] (width, height) in pixels.
            frames: [K] or one for all; the first frame of a clip is a latent frame of its own.
        """
        import numpy as np  # here: help texts list the names in this file, and want no arrays

        sides = -(-np.asarray(sizes, dtype=np.int64).reshape(-1, 2) // self.side)
        latent_frames = 1 + (np.asarray(frames, dtype=np.int64) - 1) // self.frame_stride
        made: npt.NDArray[np.int64] = sides[:, 0] * sides[:, 1] * latent_frames
        return made

    @property
    def token_cost(self) -> tuple[float, float]:
        """(a, b) of its cost in tokens: see `kohya_bucket.planning.batch_sizes`."""
        return 1.0, 1 / (6 * self.width)


TOKEN_GRIDS = {
    "sd3-medium": TokenGrid(1536),
    "sd3-large": TokenGrid(2432),
    "flux": TokenGrid(3072),
    "lumina": TokenGrid(2304),
    "hunyuan-image": TokenGrid(3584, side=32),
    "anima": TokenGrid(2048),
    "flux2-dev": TokenGrid(6144),
    "flux2-klein-9b": TokenGrid(4096),
    "flux2-klein-4b": TokenGrid(3072),
    "qwen-image": TokenGrid(3072),
    "z-image": TokenGrid(3840),
    "wan-1.3b": TokenGrid(1536, frame_stride=4),
    "wan-14b": TokenGrid(5120, frame_stride=4),
    "hunyuan-video": TokenGrid(3072, frame_stride=4),
    "hunyuan-video-1.5": TokenGrid(2048, frame_stride=4),
    "kandinsky5-lite": TokenGrid(1792, frame_stride=4),
    "kandinsky5-pro": TokenGrid(4096, frame_stride=4),
}
"""By model name, one transformer each. SD 1.5 and SDXL are not here: their U-Nets have no single number of tokens."""
