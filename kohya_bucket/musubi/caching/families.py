"""How the model families of musubi-tuner are cached: the programs that do it, and what their files hold.

Source: `dataset/architectures.py` and the caching programs of kohya-ss/musubi-tuner 0.2.13 to 0.3.6. Families that are
not here, of forks or of later versions, keep the caches and items that musubi-tuner gives them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True)
class Family:
    """How one model family is cached; `architectures.py` has what its data sets know of it.

    Attributes:
        latents, text: the programs, without `.py`.
        stride: pixels per latent in each side.
        passes: how a tensor's name begins that each pass over the captions adds to a file; empty where there is one
            pass.
        sees_controls: outputs of the text encoder depend on the images too that an item has, and on their size.
        per_clip: each clip of a video has its own outputs of the text encoder, and its sound counts, and further keys
            of its line in a list, with the files that they name.
        grown_to: sides that an option of the program rounds up to; 1 for none.
    """

    latents: str
    text: str
    stride: int = 8
    passes: tuple[str, ...] = ()
    sees_controls: bool = False
    per_clip: bool = False
    grown_to: int = 1


def _named(name: str, stride: int = 8, **more: bool | int) -> Family:
    return Family(f"{name}_cache_latents", f"{name}_cache_text_encoder_outputs", stride, **more)  # type: ignore[arg-type]


_FLUX_2, _QWEN = _named("flux_2", 16), _named("qwen_image")

FAMILIES = {
    "hv": Family("cache_latents", "cache_text_encoder_outputs", passes=("llm_", "clipL_")),
    "wan": _named("wan"),
    "fp": _named("fpack"),
    "fk": _named("flux_kontext"),
    "f2d": _FLUX_2,
    "f2k4b": _FLUX_2,
    "f2k9b": _FLUX_2,
    "qi": _QWEN,
    "qie": _named("qwen_image", sees_controls=True),
    "qil": _QWEN,
    "k5": _named("kandinsky5", grown_to=128),
    "hv15": _named("hv_1_5", 16),
    "zi": _named("zimage"),
    "ho1": Family("hidream_o1_cache_pixel", "hidream_o1_cache_text_encoder_outputs", 32, sees_controls=True),
    "i4": _named("ideogram4", 16),
    "kr2": _named("krea2"),
    "mmh3": _named("minimax_h3", 16, sees_controls=True, per_clip=True),
}
