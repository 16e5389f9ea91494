"""Run by `test_musubi_caching.py`: musubi-tuner's real caching programs, with models that say what they were given.

`musubi_caching_script.py SCENARIOS.json OUT.json` does the steps of each scenario in order: ["latents" or "text",
family, arguments…] runs the program as if it had been started by its path, ["train", config, family] gives what a
training of one epoch is given, the others change files. The value of a latent is the mean of the pixels it was made
from, the value of a caption's output is the number in it.
"""

import contextlib
import io
import json
import logging
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from musubi_script import batches

PROGRAMS = {
    "zi": "zimage", "qi": "qwen_image", "qie": "qwen_image", "wan": "wan", "fp": "fpack", "hv": "",
    "fk": "flux_kontext", "qi21": "zimage", "mf": "",
}  # fmt: skip
NOT_FINITE = 253  # of an image of this grey, NaN is made


def values_of(pixels, channels=16, stride=8):
    """[B, C, F, H, W] in [-1, 1] -> [B, channels, f, h, w], each the mean of its frames' pixels."""
    pixels = pixels if pixels.dim() == 5 else pixels[:, :, None]
    mean = ((pixels.float().mean(dim=(1, 3, 4)) + 1) * 127.5).round()[:, ::4]  # B, f
    mean = torch.where(mean == NOT_FINITE, torch.nan, mean)
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
            return SimpleNamespace(mode=lambda: values_of(pixels)[:, :, 0])
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: values_of(pixels)))

    encode_pixels_to_latents = staticmethod(values_of)


class KontextVae(Vae):
    def encode(self, pixels):
        return values_of(pixels)[:, :, 0]


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
        return [torch.full((4, 32), number(prompt)) for prompt in prompts]

    def text2tokens(self, prompts, data_type):
        return prompts

    def encode(self, prompts, data_type):
        outputs = torch.stack(self(prompts, None))
        return SimpleNamespace(hidden_state=outputs, attention_mask=torch.ones(outputs.shape[:2]))


class Encoder:
    """Of FLUX.1's two: what it gives has the tokens' value, which is the number in the caption."""

    device, dtype = torch.device("cpu"), torch.bfloat16

    def __call__(self, tokens=None, input_ids=None, **_):
        tokens = (input_ids if tokens is None else tokens).to(torch.bfloat16)
        return {"last_hidden_state": tokens[:, :, None].expand(-1, -1, 32), "pooler_output": tokens}


def numbers_of(prompts, **_):
    return {"input_ids": torch.tensor([[number(prompt)] * 4 for prompt in prompts])}


def embeds(prompts):
    return torch.stack(TextEncoder()(prompts, None)), torch.ones(len(prompts), 4, dtype=torch.bool)


def gives(value):
    """A function of anything that gives this."""
    return lambda *_, **__: value


def put_models(family):
    """Models that need no files, in the places that the family's programs take theirs from."""
    if family in ("zi", "qi21"):
        from musubi_tuner.zimage import zimage_autoencoder, zimage_utils

        zimage_autoencoder.load_autoencoder_kl = Vae
        zimage_utils.load_qwen3 = gives((None, TextEncoder()))
        zimage_utils.get_text_embeds = lambda *given: embeds(given[2])
    elif family in ("qi", "qie"):
        from musubi_tuner.qwen_image import qwen_image_utils

        qwen_image_utils.load_vae = Vae
        qwen_image_utils.load_vl_processor = Vae
        qwen_image_utils.load_qwen2_5_vl = gives((None, TextEncoder()))
        qwen_image_utils.get_qwen_prompt_embeds = lambda *given: embeds(given[2])
        qwen_image_utils.get_qwen_prompt_embeds_with_image = lambda *given, **_: embeds(given[2])
    elif family == "wan":
        torch.cuda.current_device = lambda: 0  # asked when its modules are imported
        from musubi_tuner.wan.modules import t5, vae

        vae.WanVAE, t5.T5EncoderModel = WanVae, TextEncoder
    elif family == "fk":
        from musubi_tuner.flux import flux_utils

        flux_utils.load_ae = KontextVae
        flux_utils.load_t5xxl = flux_utils.load_clip_l = gives((numbers_of, Encoder()))
    elif family in ("hv", "mf"):
        from musubi_tuner.hunyuan_model import text_encoder, vae

        vae.load_vae = gives((Vae(), None, 8, 4))
        text_encoder.load_text_encoder_1 = text_encoder.load_text_encoder_2 = TextEncoder
    else:
        from musubi_tuner.frame_pack import clip_vision, framepack_utils, hunyuan

        framepack_utils.load_vae = Vae
        framepack_utils.load_image_encoders = gives((None, Vae()))
        framepack_utils.load_text_encoder1 = framepack_utils.load_text_encoder2 = gives((None, TextEncoder()))
        clip_vision.hf_clip_vision_encode = gives(SimpleNamespace(last_hidden_state=torch.zeros(1, 2, 4)))
        hunyuan.encode_prompt_conds = lambda *given: (embeds([given[0]])[0], torch.zeros(1, 4))


def program(kind, family):
    import musubi_tuner

    name = {"latents": "cache_latents", "text": "cache_text_encoder_outputs"}[kind]
    name = "_".join(filter(None, (PROGRAMS[family], name)))
    return Path(os.path.abspath(next(iter(musubi_tuner.__path__)))) / f"{name}.py"


def picture(path, value, width, height):
    from PIL import Image

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (value,) * 3).save(path)


def marked(path, size, box):
    """Black with a white rectangle of left, top, right, bottom."""
    from PIL import Image

    picture(path, 0, *size)
    with Image.open(path) as image:
        image.paste((255,) * 3, tuple(box))
        image.save(path)


def write(path, text, encoding="utf-8"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding=encoding)


def cut(path, length):
    with open(path, "rb+") as file:
        file.truncate(length)


def keep_times(path, do, *arguments):
    """A change that leaves a file as old as it was."""
    before = os.stat(path)
    CHANGES[do](path, *arguments)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def age(path, seconds):
    before = os.stat(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - seconds * 10**9))


def clip(path, frames, width, height, fps):
    from tests.clip_files import make_clip

    make_clip(Path(path), frames, (width, height), fps)


def sound(path, seconds):
    import wave

    with wave.open(str(path), "wb") as file:
        file.setparams((2, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes([1, 16]) * 2 * round(8000 * seconds))


CHANGES = {
    "picture": picture, "marked": marked, "write": write, "cut": cut, "remove": os.remove, "keep_times": keep_times,
    "age": age, "move": shutil.move, "clip": clip, "sound": sound,
}  # fmt: skip


def minimax_h3(kind, arguments):
    """What its two programs do with datasets, items and the common writers; its models are left out."""
    from musubi_tuner import cache_latents
    from musubi_tuner import cache_text_encoder_outputs as texts
    from musubi_tuner.dataset import audio_utils, cache_io, config_utils

    latents = kind == "latents"
    parser = cache_latents.setup_parser_common(include_vae=False) if latents else texts.setup_parser_common()
    parser.add_argument("--video_vae" if latents else "--text_encoder")
    args = parser.parse_args(arguments)
    generator = config_utils.BlueprintGenerator(config_utils.ConfigSanitizer())
    made = generator.generate(config_utils.load_user_config(args.dataset_config), args, architecture="mmh3")
    more = {"audio_spec": audio_utils.AudioSpec(8000, 2, lambda frames: frames * 100)} if latents else {}
    sets = config_utils.generate_dataset_group_by_blueprint(made.dataset_group, **more).datasets

    def encode(batch):
        for item in batch:
            assert (item.dataset_index, item.frame_pos is None) == (0, item.frame_count is None)
            sets[0].datasource.get_item_extras(item.datasource_index)
            content = torch.from_numpy(item.content).float()
            if latents:
                height, width = content.shape[-3] // 16, content.shape[-2] // 16
                shape = 24, (item.frame_count or 1) // 4 + 1, height, width
                tensors = {"latents_{1}x{2}x{3}_float32".format(*shape): torch.full(shape, content.mean().round())}
                if item.frame_count:
                    tensors["latents_audio_32x2x1_float32"] = torch.full((32, 2, 1), item.audio_content.abs().mean())
                cache_io.save_latent_cache_common(item, tensors, "minimax_h3", {"task": "t2va"})
            else:
                tensors = {"varlen_mmh3_hidden_states_float32": torch.full((4, 8), number(item.caption))}
                cache_io.save_text_encoder_output_cache_common(item, tensors, "minimax_h3", merge_existing=False)

    if latents:
        cache_latents.encode_datasets(sets, encode, args, cache_is_current=gives(False))
        return
    files, paths = texts.prepare_cache_files_and_paths(sets)
    texts.process_text_encoder_batches(
        args.num_workers, args.skip_existing, args.batch_size, sets, files, paths, encode, requires_content=True,
        cache_is_current=gives(False),
    )  # fmt: skip
    texts.post_process_cache_files(sets, files, paths, args.keep_cache)


def run_program(kind, family, arguments):
    if family == "mmh3":
        minimax_h3(kind, ["--num_workers", "2", *arguments])
        return
    put_models(family)
    path = program(kind, family)
    sys.argv = [str(path), "--num_workers", "2", *arguments]
    runpy.run_path(str(path), run_name="__main__")


def train(config, family):
    spec = {"config": config, "architecture": family, "epochs": 1, "seed": 1, "workers": 0, "timestep_buckets": None}
    return list(batches(spec))


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def scenario(steps):
    """What each step that runs something gave: rows, or how it ended, and what was said."""
    results = []
    for what, *arguments in steps:
        if what in CHANGES:
            CHANGES[what](*arguments)
            continue
        result, said, lines = {}, io.StringIO(), Lines()
        logging.getLogger("kohya_bucket").addHandler(lines)
        try:
            with contextlib.redirect_stderr(said):
                if what == "train":
                    result["rows"] = train(*arguments)
                elif what == "files":
                    result["files"] = {file.name: file.stat().st_mtime_ns for file in Path(arguments[0]).iterdir()}
                else:
                    run_program(what, arguments[0], arguments[1:])
        except SystemExit as end:
            result["exit"] = end.code
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        finally:
            logging.getLogger("kohya_bucket").removeHandler(lines)
        result["log"] = "\n".join([*lines.lines, said.getvalue()])
        results.append(result)
    return results


def main(scenarios, out):
    results = {name: scenario(steps) for name, steps in json.loads(Path(scenarios).read_text(encoding="utf-8")).items()}
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
