"""Run by `test_musubi_encoding.py`: latents of a picture by musubi-tuner's own VAE of Qwen-Image, small.

`musubi_encoding_script.py TYPE`, with the door open where a launcher started it.
"""

import json
import sys

import torch
from musubi_tuner.dataset import image_video_dataset  # noqa: F401  (with which the door opens)
from musubi_tuner.qwen_image.qwen_image_autoencoder_kl import AutoencoderKLQwenImage


def main(dtype):
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1).requires_grad_(False).eval().to(getattr(torch, dtype))
    picture = torch.rand((2, 3, 1, 64, 48), generator=torch.Generator().manual_seed(1)) * 2 - 1
    latents = vae.encode_pixels_to_latents(picture.to(vae.dtype))
    folded = {name for name, part in vae.named_children() if any("forward" in vars(one) for one in part.modules())}
    print(json.dumps([sorted(folded), latents.float().flatten().tolist()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
