"""The model families of sd-scripts: how each caches latents, what encoder and training do to them, its trainers.

Source: the `LatentsCachingStrategy` classes of kohya-ss/sd-scripts 0.9 to 0.11 (names, keys, shapes, types), the
encoders they call (scaling), and the calls of `verify_bucket_reso_steps` in its trainers.

Further the transformers of which it is known how many tokens they make of an image or a clip (`TOKEN_GRIDS`). Source:
strides, patches, widths and numbers of blocks in the model code of sd-scripts v0.11.1 (`library/*_models.py`) and
musubi-tuner v0.3.4 (`wan/configs`, `hunyuan_model`, `hunyuan_video_1_5`, `qwen_image`, `zimage`, `flux_2`,
`kandinsky5`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kohya_bucket.buckets.families import family_named
from kohya_bucket.errors import ConfigError, KohyaBucketError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class LatentSpace:
    """What the numbers of a shard mean.

    Attributes:
        scale_factor, shift_factor: training takes `(raw - shift_factor) * scale_factor`.
        values: "raw", as the VAE gives them, or "scaled", with that already applied; "text", outputs of text encoders.
        downsample_factor: pixels per latent in each side.
        architecture: sd-scripts' name of the model family, where known ("sdxl", "flux", ...).
    """

    scale_factor: float = 1.0
    shift_factor: float = 0.0
    values: str = "raw"
    downsample_factor: int = 8
    architecture: str = ""

    @classmethod
    def of(cls, stated: Any) -> LatentSpace:
        """The same of what a file states. Raises `ValueError` or `TypeError` if numbers cannot mean that."""
        space = cls(**stated)
        numbers = (space.scale_factor, space.shift_factor, space.downsample_factor)
        usable = all(type(n) in (int, float) and math.isfinite(n) for n in numbers) and space.scale_factor != 0
        if not usable or type(space.downsample_factor) is not int or space.downsample_factor < 1:
            raise ValueError(f"latents cannot be scaled by {numbers}")
        if space.values not in ("raw", "scaled", "text") or not isinstance(space.architecture, str):
            raise ValueError(f"latents cannot be {space.values!r} of {space.architecture!r}")
        return space


_OLDEST = (0, 10)


@dataclass(frozen=True)
class Architecture:
    """How sd-scripts caches one model family.

    Attributes:
        name: its name here and in `--arch`.
        title: its name for people.
        suffix: end of the file's name.
        stride: pixels per latent in each side.
        channels: latent channels.
        multi_resolution: keys end in the latent's size, and one file holds several.
        plain_until: the last version of sd-scripts whose keys had no size, so that a file held one resolution; "" for
            families whose keys always had one, "0" for those of a fork that never have one. Newer versions still read
            such files.
        scale_factor, shift_factor: training takes `(raw - shift_factor) * scale_factor`.
        values: whether the file holds "raw" latents or ones already "scaled".
        per_channel: each channel has a scale of its own, which only the autoencoder knows. Early caches of such a
            family have an axis of length 1 after the channels, which is dropped when they are read.
        autoencoder: diffusers' class of its VAE.
        checkpoint_key: how a key begins that only a whole checkpoint of this family has; "" where none is known.
        trainers: its trainers, each by the file's name and what `bucket_reso_steps` must be a multiple of there, as the
            newest sd-scripts has it.
    """

    name: str
    title: str
    suffix: str
    stride: int
    channels: int
    multi_resolution: bool = True
    plain_until: str = ""
    scale_factor: float = 1.0
    shift_factor: float = 0.0
    values: str = "raw"
    per_channel: bool = False
    autoencoder: str = "AutoencoderKL"
    checkpoint_key: str = ""
    trainers: tuple[tuple[str, int], ...] = ()

    @property
    def values_per_pixel(self) -> float:
        """Numbers of a latent per pixel of its image."""
        return self.channels / self.stride**2

    @property
    def space(self) -> LatentSpace:
        """What the numbers in its files mean."""
        return LatentSpace(self.scale_factor, self.shift_factor, self.values, self.stride, self.name)

    def key_suffix(self, bucket_size: tuple[int, int]) -> str:
        """What keys end in for a bucket (width, height): "" or `_{latent height}x{latent width}`."""
        return self.key_suffixes(bucket_size)[0]

    def key_suffixes(self, bucket_size: tuple[int, int]) -> tuple[str, ...]:
        """What keys may end in for a bucket, of any writer; first what this family's readers ask for first."""
        sized = f"_{bucket_size[1] // self.stride}x{bucket_size[0] // self.stride}"
        if not self.plain_until:
            return (sized,)
        return (sized, "") if self.multi_resolution else ("", sized)

    def shape(self, bucket_size: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the latents of a bucket: [C, h, w]."""
        return self.channels, bucket_size[1] // self.stride, bucket_size[0] // self.stride

    def read_by(self, version: str) -> Architecture:
        """The family as a version of sd-scripts reads it, such as "0.10.1" or "0.11"; "" is the newest. Raises
        `KohyaBucketError` for anything but a version, or one that looks for files of other names."""
        if not version:
            return self
        if not is_version(version):
            raise KohyaBucketError(f"{version!r} is not a version of sd-scripts: use one such as 0.10.1 or 0.11")
        if _numbers(version) < _OLDEST:
            raise KohyaBucketError(
                f"sd-scripts {version} looks for IMAGE.npz and not for the files that are written here: 0.10 is the "
                "oldest that reads them"
            )
        return self.with_sizes(_numbers(version) > _numbers(self.plain_until)) if self.plain_until else self

    def with_sizes(self, sized: bool) -> Architecture:
        """The same family with keys that have a size or none, where there are both."""
        return replace(self, multi_resolution=sized) if self.plain_until else self


def is_version(text: str) -> bool:
    """Whether this is a version of sd-scripts, as "0.10.1" or "v0.11"."""
    return re.fullmatch(r"v?\d+(\.\d+)*", text) is not None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.removeprefix("v").split(".")))


# the Flux autoencoder scales in its own encode, SD3 and HunyuanImage scale when they train, Anima's normalizes
# each channel by a mean and a standard deviation
ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("sd", "SD 1.5", "_sd.npz", 8, 4, plain_until="0.10.1", scale_factor=0.18215,
                     checkpoint_key="cond_stage_model.",
                     trainers=(("train_network.py", 64), ("fine_tune.py", 64), ("train_db.py", 64),
                               ("train_control_net.py", 64), ("train_controlnet.py", 64),
                               ("train_textual_inversion.py", 64))),
        Architecture("sdxl", "SDXL", "_sdxl.npz", 8, 4, plain_until="0.10.1", scale_factor=0.13025,
                     checkpoint_key="conditioner.embedders.1.",
                     trainers=(("sdxl_train_network.py", 32), ("sdxl_train.py", 32), ("sdxl_train_control_net.py", 32),
                               ("sdxl_train_control_net_lllite.py", 32), ("sdxl_train_textual_inversion.py", 32))),
        Architecture("sd3", "SD3", "_sd3.npz", 8, 16, scale_factor=1.5305, shift_factor=0.0609,
                     checkpoint_key="model.diffusion_model.joint_blocks.",
                     trainers=(("sd3_train_network.py", 32), ("sd3_train.py", 8))),
        Architecture("flux", "Flux", "_flux.npz", 8, 16, scale_factor=0.3611, shift_factor=0.1159, values="scaled",
                     checkpoint_key="model.diffusion_model.double_blocks.",
                     trainers=(("flux_train_network.py", 32), ("flux_train.py", 16),
                               ("flux_train_control_net.py", 16))),
        Architecture("lumina", "Lumina", "_lumina.npz", 8, 16, scale_factor=0.3611, shift_factor=0.1159,
                     values="scaled",
                     trainers=(("lumina_train_network.py", 16), ("lumina_train.py", 16))),
        Architecture("hunyuan_image", "HunyuanImage", "_hi.npz", 32, 64, scale_factor=0.75289,
                     autoencoder="AutoencoderKLHunyuanImage",
                     trainers=(("hunyuan_image_train_network.py", 32),)),
        Architecture("anima", "Anima", "_anima.npz", 8, 16, values="scaled", per_channel=True,
                     autoencoder="AutoencoderKLQwenImage",
                     trainers=(("anima_train_network.py", 16), ("anima_train.py", 16),
                               ("anima_train_control_net_lllite.py", 16))),
    )
}  # fmt: skip


@dataclass(frozen=True)
class TokenGrid:
    """How a transformer cuts a latent image or clip into tokens, and what its blocks spend on them.

    Attributes:
        width: of its blocks.
        blocks: how many it has.
        side: pixels of a token in each side: of the autoencoder's latents times those of a patch.
        frame_stride: frames of a latent frame after the first; 1 for models of images.
    """

    width: int
    blocks: int
    side: int = 16
    frame_stride: int = 1

    def tokens(self, sizes: npt.ArrayLike, frames: npt.ArrayLike = 1) -> npt.NDArray[np.int64]:
        """[K] tokens of one image or clip of each bucket; a part of a patch counts as one.

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
        """(a, b) of its cost in tokens: see `kohya_bucket.planning.costs`."""
        return 1.0, 1 / (6 * self.width)


TOKEN_GRIDS = {
    "sd3-medium": TokenGrid(1536, 24),
    "sd3-large": TokenGrid(2432, 38),
    "flux": TokenGrid(3072, 57),
    "lumina": TokenGrid(2304, 26),
    "hunyuan-image": TokenGrid(3584, 60, side=32),
    "anima": TokenGrid(2048, 28),
    "flux2-dev": TokenGrid(6144, 56),
    "flux2-klein-9b": TokenGrid(4096, 32),
    "flux2-klein-4b": TokenGrid(3072, 25),
    "qwen-image": TokenGrid(3072, 60),
    "z-image": TokenGrid(3840, 30),
    "wan-1.3b": TokenGrid(1536, 30, frame_stride=4),
    "wan-14b": TokenGrid(5120, 40, frame_stride=4),
    "hunyuan-video": TokenGrid(3072, 60, frame_stride=4),
    "hunyuan-video-1.5": TokenGrid(2048, 54, frame_stride=4),
    "kandinsky5-lite": TokenGrid(1792, 32, frame_stride=4),
    "kandinsky5-pro": TokenGrid(4096, 60, frame_stride=4),
}
"""By the model's name: one transformer each. Those of SD 1.5 and SDXL make no one number of tokens of an image."""


@dataclass(frozen=True)
class Trainer:
    """What advice has to hold for: one trainer of sd-scripts, those of one family, or all.

    Attributes:
        title: what messages call it; "" where no trainer is named.
        steps: {file: what `bucket_reso_steps` must be a multiple of}.
        family: the name of theirs; "" for all.
    """

    title: str
    steps: Mapping[str, int]
    family: str = ""

    @property
    def step(self) -> int:
        """The least step that all of them accept."""
        return math.lcm(*self.steps.values())

    def refusing(self, step: int) -> dict[str, int]:
        """Those that stop at this `bucket_reso_steps`, with what they demand."""
        return {file: least for file, least in self.steps.items() if step % least}

    def longest(self, resolution: tuple[int, int], step: int) -> int:
        """The usual `max_bucket_reso` at a resolution: where it is lower, ordinary aspects lose pixels."""
        usual = family_named(self.family).max_size if self.family else 0
        longest = max(usual, 2 * math.isqrt(resolution[0] * resolution[1]), *resolution)
        return -(-longest // step) * step

    def as_in(self, steps: Mapping[str, int]) -> Trainer:
        """The same with the steps that a checkout's trainers have; files that it lacks do not count."""
        there = {file: steps[file] for file in self.steps if file in steps}
        return replace(self, steps=there) if there else self


ANY_TRAINER = Trainer("", {file: step for a in ARCHITECTURES.values() for file, step in a.trainers})


NAME_THE_MODEL = f"name your model, for advice that fits it: --arch {', '.join(ARCHITECTURES)}"


def trainer_named(word: str) -> Trainer:
    """The trainers that a family's name (`sdxl`, `SD 1.5`) or a trainer's file (`flux_train.py`) stands for. Raises
    `ConfigError` with the nearest name where there is none."""
    known: dict[str, Trainer] = {}
    for arch in ARCHITECTURES.values():
        for name in (arch.name, arch.title):
            known[_plain(name)] = Trainer(f"{arch.title} trainers", dict(arch.trainers), arch.name)
        for file, step in arch.trainers:
            known[_plain(file)] = Trainer(file, {file: step}, arch.name)
    found = known.get(_plain(word.replace("\\", "/").rpartition("/")[2]))
    if found is None:
        near = difflib.get_close_matches(_plain(word), known, n=1)
        hint = f"did you mean {near[0]}?" if near else "or a trainer's file, such as flux_train.py"
        raise ConfigError(f"--arch {word!r}: use one of {', '.join(ARCHITECTURES)}; {hint}")
    return found


def families_refusing(step: int) -> str:
    """The families with trainers that stop at a `bucket_reso_steps`, and what they demand: "SD 1.5 (64), SDXL (32)"."""
    demands = {a.title: sorted({least for _, least in a.trainers if step % least}) for a in ARCHITECTURES.values()}
    return ", ".join(f"{title} ({' or '.join(map(str, steps))})" for title, steps in demands.items() if steps)


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower().removesuffix(".py"))
