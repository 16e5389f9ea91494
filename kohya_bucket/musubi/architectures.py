"""The model families of musubi-tuner, as far as its data sets know them.

Source: kohya-ss/musubi-tuner 0.3.6, `dataset/architectures.py`, `BucketSelector.ARCHITECTURE_STEPS_MAP` and
`VideoDataset`; the trainers are the files beside them. `compat_tests/test_reference_clips.py` compares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from kohya_bucket.buckets.clips import FrameGrid
from kohya_bucket.checks import nearest
from kohya_bucket.errors import ConfigError

__all__ = ["ARCHITECTURES", "Architecture", "architecture_named"]

_GRID = FrameGrid()


@dataclass(frozen=True)
class Architecture:
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


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("hv", "hunyuan_video", "HunyuanVideo", ("hv_train",), target_fps=24.0),
        Architecture("wan", "wan", "Wan", ("wan_train",), target_fps=16.0),
        Architecture("fp", "framepack", "FramePack", ("fpack_train",), target_fps=30.0, in_sections=True),
        Architecture("fk", "flux_kontext", "FLUX.1 Kontext", ("flux_kontext_train",), target_fps=1.0),
        Architecture("f2d", "flux_2_dev", "FLUX.2 dev", ("flux_2_train",)),
        Architecture("f2k4b", "flux_2_klein_4b", "FLUX.2 klein 4B", ()),
        Architecture("f2k9b", "flux_2_klein_9b", "FLUX.2 klein 9B", ()),
        Architecture("qi", "qwen_image", "Qwen-Image", ("qwen_image_train",)),
        Architecture("qie", "qwen_image_edit", "Qwen-Image-Edit", ()),
        Architecture("qil", "qwen_image_layered", "Qwen-Image-Layered", ()),
        Architecture("k5", "kandinsky5", "Kandinsky 5", ("kandinsky5_train",), target_fps=24.0),
        Architecture("hv15", "hunyuan_video_1_5", "HunyuanVideo 1.5", ("hv_1_5_train",), target_fps=24.0),
        Architecture("zi", "z_image", "Z-Image", ("zimage_train",)),
        Architecture("ho1", "hidream_o1_image", "HiDream-O1", ("hidream_o1_train",), steps=32),
        Architecture("i4", "ideogram4", "Ideogram 4", ("ideogram4_train",)),
        Architecture("kr2", "krea2", "Krea 2", ("krea2_train",)),
        Architecture(
            "mmh3", "minimax_h3", "MiniMax-H3", ("minimax_h3_train",), 32, 24.0, FrameGrid(17, 5, (5, 2)), by_time=True
        ),
    )
}


def architecture_named(word: str) -> Architecture:
    """The family that a name (`wan`, `hunyuan_video`) or a trainer's file (`wan_train_network.py`) stands for.

    Raises:
        ConfigError: there is none, with the nearest that is.
    """
    known: dict[str, Architecture] = {}
    for family in ARCHITECTURES.values():
        known |= {_plain(name): family for name in (family.name, family.full_name, family.title)}
    file = word.replace("\\", "/").rpartition("/")[2]
    if file.endswith(".py"):
        found = [a for a in ARCHITECTURES.values() for start in a.trainers if re.match(rf"{start}(_|\.)", file)]
    else:
        found = [known[_plain(word)]] if _plain(word) in known else []
    if not found:
        near = f"; the nearest is {known[nearest(_plain(word), known)].name}" if _plain(word) else ""
        raise ConfigError(
            f"--arch is {word!r}, but must be a family of musubi-tuner ({', '.join(ARCHITECTURES)}), or one of its "
            f"trainers, such as wan_train_network.py{near}"
        )
    path = Path(word)
    return replace(found[0], trainer=path.resolve()) if path.is_file() else found[0]


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
