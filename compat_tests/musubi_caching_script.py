"""Run by `test_musubi_caching.py`: musubi-tuner's real caching programs, with models that say what they were given.

`musubi_caching_script.py SPEC.json` does what its "do" lists, in order: ["latents" or "text", family, arguments…] runs
the program as if it had been started by its path, ["train", family] writes what a training of one epoch is given. The
value of a latent is the mean of the pixels it was made from, the value of a caption's output is the number in it.
"""

import json
import os
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from musubi_script import batches

PROGRAMS = {
    "zi": "zimage", "qi": "qwen_image", "qie": "qwen_image", "wan": "wan", "fp": "fpack", "hv": "",
}  # fmt: skip


def values_of(pixels, channels=16, stride=8):
    """[B, C, F, H, W] in [-1, 1] -> [B, channels, f, h, w], each the mean of its frames' pixels."""
    mean = ((pixels.float().mean(dim=(1, 3, 4)) + 1) * 127.5).round()[:, ::4]  # B, f
    height, width = pixels.shape[3] // stride, pixels.shape[4] // stride
    return mean[:, None, :, None, None].expand(-1, channels, -1, height, width).contiguous()


class Vae:
    device, dtype = torch.device("cpu"), torch.float32
    config = SimpleNamespace(scaling_factor=1.0)

    def __init__(self, *args, **kwargs):
        self.known = kwargs or args

    def to(self, *args, **kwargs):
        return self

    def eval(self):
        return self

    def encode(self, pixels):
        if pixels.dim() == 4:
            return SimpleNamespace(mode=lambda: values_of(pixels[:, :, None])[:, :, 0])
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: values_of(pixels)))

    encode_pixels_to_latents = staticmethod(values_of)


class WanVae(Vae):
    def encode(self, pixels):
        return list(values_of(pixels))


def number(caption):
    return float(re.search(r"\d+", caption)[0])


class TextEncoder:
    dtype = torch.float32

    def __init__(self, *args, **kwargs):
        pass

    def to(self, *args, **kwargs):
        return self

    def eval(self):
        return self

    def __call__(self, prompts, device):
        return [torch.full((4, 8), number(prompt)) for prompt in prompts]

    def text2tokens(self, prompts, data_type):
        return prompts

    def encode(self, prompts, data_type):
        outputs = torch.stack(self(prompts, None))
        return SimpleNamespace(hidden_state=outputs, attention_mask=torch.ones(outputs.shape[:2]))


def embeds(prompts):
    return torch.stack(TextEncoder()(prompts, None)), torch.ones(len(prompts), 4, dtype=torch.bool)


def put_models(family):
    """Models that need no files, in the places that the family's programs take theirs from."""
    if family == "zi":
        from musubi_tuner.zimage import zimage_autoencoder, zimage_utils

        zimage_autoencoder.load_autoencoder_kl = Vae
        zimage_utils.load_qwen3 = lambda *args, **kwargs: (None, TextEncoder())
        zimage_utils.get_text_embeds = lambda tokenizer, encoder, prompts: embeds(prompts)
    elif family in ("qi", "qie"):
        from musubi_tuner.qwen_image import qwen_image_utils

        qwen_image_utils.load_vae = Vae
        qwen_image_utils.load_vl_processor = Vae
        qwen_image_utils.load_qwen2_5_vl = lambda *args, **kwargs: (None, TextEncoder())
        qwen_image_utils.get_qwen_prompt_embeds = lambda tokenizer, encoder, prompts: embeds(prompts)
        qwen_image_utils.get_qwen_prompt_embeds_with_image = lambda *args, **kwargs: embeds(args[2])
    elif family == "wan":
        from musubi_tuner.wan.modules import t5, vae

        vae.WanVAE, t5.T5EncoderModel = WanVae, TextEncoder
    elif family == "hv":
        from musubi_tuner.hunyuan_model import text_encoder, vae

        vae.load_vae = lambda **kwargs: (Vae(), None, 8, 4)
        text_encoder.load_text_encoder_1 = text_encoder.load_text_encoder_2 = TextEncoder
    else:
        from musubi_tuner.frame_pack import clip_vision, framepack_utils, hunyuan

        framepack_utils.load_vae = Vae
        framepack_utils.load_image_encoders = lambda args: (None, Vae())
        framepack_utils.load_text_encoder1 = framepack_utils.load_text_encoder2 = lambda *args: (None, TextEncoder())
        state = SimpleNamespace(last_hidden_state=torch.zeros(1, 2, 4))
        clip_vision.hf_clip_vision_encode = lambda *args: state
        hunyuan.encode_prompt_conds = lambda prompt, *models: (embeds([prompt])[0], torch.zeros(1, 4))


def program(kind, family):
    import musubi_tuner

    name = {"latents": "cache_latents", "text": "cache_text_encoder_outputs"}[kind]
    name = "_".join(filter(None, (PROGRAMS[family], name)))
    return Path(os.path.abspath(next(iter(musubi_tuner.__path__)))) / f"{name}.py"


def main(spec):
    for what, family, *arguments in spec["do"]:
        if what == "train":
            rows = list(batches(spec | {"architecture": family, "epochs": 1, "seed": 1, "workers": 0}))
            Path(spec["out"]).write_text(json.dumps(rows), encoding="utf-8")
            continue
        put_models(family)
        path = program(what, family)
        sys.argv = [str(path), "--dataset_config", spec["config"], *arguments]
        runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
