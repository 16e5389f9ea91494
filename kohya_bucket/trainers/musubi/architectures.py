"""The model families of musubi-tuner, as far as its datasets know them.

Source: kohya-ss/musubi-tuner 0.3.6, `dataset/architectures.py`, `BucketSelector.ARCHITECTURE_STEPS_MAP` and
`VideoDataset`; the trainers are the files beside them. `compat_tests/test_reference_clips.py` compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_bucket.buckets.clips import FrameGrid

_GRID = FrameGrid()


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: how its caches end, and its name in `--arch`.
        full_name: its long name there.
        title: its name for people.
        trainers: what the files of its trainers begin with.
        steps: every side of a bucket is a multiple of this.
        target_fps: frames per second of its clips; None for a family that trains none.
        grid: the numbers of frames that it takes.
        by_time: clips are always brought to the rate, by their frames' times: `source_fps` is ignored.
        in_sections: clips are trained in sections of `fp_latent_window_size` latents, each an item.
        trainer: the file that named it, if one did.
        defined_in: the code that says what is known of it, where the table does not have it.
        plain: its caches are named and found as most are; else they are left to musubi-tuner.
        latents, text: its caching programs, without `.py`.
        stride: pixels per latent in each side; 0 where that is not known.
        passes: how a tensor's name begins that each pass over the captions adds to a file; empty where there is one
            pass, None where the number is not known.
        sees_controls: outputs of the text encoder depend on the images too that an item has, and on their size.
        grown_to: sides that an option of the program rounds up to; 1 for none.
        per_clip: each clip of a video has its own outputs of the text encoder, and its sound counts, and further keys
            of its line in a list, with the files that they name.
        controls: how many control images it takes with each image; None for any number.
        needs_control: it trains no image without one.
        keeps_controls: its caches hold control images, so that items of a batch have as many, of equal sizes.
    """

    name: str
    full_name: str
    title: str
    trainers: tuple[str, ...]
    steps: int = 16
    target_fps: float | None = None
    grid: FrameGrid = _GRID
    by_time: bool = False
    in_sections: bool = False
    trainer: Path | None = None
    defined_in: Path | None = None
    plain: bool = True
    latents: str = ""
    text: str = ""
    stride: int = 8
    passes: tuple[str, ...] | None = ()
    sees_controls: bool = False
    grown_to: int = 1
    per_clip: bool = False
    controls: int | None = 1
    needs_control: bool = False
    keeps_controls: bool = False

    @property
    def long_name(self) -> str:
        """What people call it, in `--arch`."""
        return self.full_name.replace("_", "-")


ANY = Family("", "", "any model but HiDream-O1 and MiniMax-H3", (), keeps_controls=True)
"""What all but two have in common, used when no model is named."""

_H3_GRID = FrameGrid(17, 5, (5, 2))


def _family(
    name: str, full_name: str, title: str, program: str, trained: bool = True, **more: Any
) -> tuple[str, Family]:
    """One whose trainers and caching programs begin with `program`."""
    names = {"latents": f"{program}_cache_latents", "text": f"{program}_cache_text_encoder_outputs"} | more
    return name, Family(name, full_name, title, (f"{program}_train",) if trained else (), **names)


ARCHITECTURES = dict(
    (
        _family("hv", "hunyuan_video", "HunyuanVideo", "hv", target_fps=24.0, latents="cache_latents",
                text="cache_text_encoder_outputs", passes=("llm_", "clipL_")),
        _family("wan", "wan", "Wan", "wan", target_fps=16.0, keeps_controls=True),
        _family("fp", "framepack", "FramePack", "fpack", target_fps=30.0, in_sections=True),
        _family("fk", "flux_kontext", "FLUX.1 Kontext", "flux_kontext", target_fps=1.0, needs_control=True,
                keeps_controls=True),
        _family("f2d", "flux_2_dev", "FLUX.2 dev", "flux_2", stride=16, controls=None, keeps_controls=True),
        _family("f2k4b", "flux_2_klein_4b", "FLUX.2 klein 4B", "flux_2", trained=False, stride=16, controls=None,
                keeps_controls=True),
        _family("f2k9b", "flux_2_klein_9b", "FLUX.2 klein 9B", "flux_2", trained=False, stride=16, controls=None,
                keeps_controls=True),
        _family("qi", "qwen_image", "Qwen-Image", "qwen_image", keeps_controls=True),
        _family("qie", "qwen_image_edit", "Qwen-Image-Edit", "qwen_image", trained=False, sees_controls=True,
                controls=None, keeps_controls=True),
        _family("qil", "qwen_image_layered", "Qwen-Image-Layered", "qwen_image", trained=False, keeps_controls=True),
        _family("k5", "kandinsky5", "Kandinsky 5", "kandinsky5", target_fps=24.0, grown_to=128),
        _family("hv15", "hunyuan_video_1_5", "HunyuanVideo 1.5", "hv_1_5", target_fps=24.0, stride=16),
        _family("zi", "z_image", "Z-Image", "zimage"),
        _family("ho1", "hidream_o1_image", "HiDream-O1", "hidream_o1", steps=32, stride=32, sees_controls=True,
                latents="hidream_o1_cache_pixel", controls=None, keeps_controls=True),
        _family("i4", "ideogram4", "Ideogram 4", "ideogram4", stride=16),
        _family("kr2", "krea2", "Krea 2", "krea2"),
        _family("mmh3", "minimax_h3", "MiniMax-H3", "minimax_h3", steps=32, stride=16, target_fps=24.0, by_time=True,
                grid=_H3_GRID, sees_controls=True, per_clip=True, controls=None),
    )
)  # fmt: skip

OF_TOKENS = {
    "flux": "fk", "flux2-dev": "f2d", "flux2-klein-4b": "f2k4b", "flux2-klein-9b": "f2k9b", "z-image": "zi",
    "wan-1.3b": "wan", "wan-14b": "wan", "hunyuan-video": "hv", "hunyuan-video-1.5": "hv15",
    "kandinsky5-lite": "k5", "kandinsky5-pro": "k5",
}  # fmt: skip
"""Families by what the option `model` calls a model whose tokens count. Three have that of Qwen-Image."""
