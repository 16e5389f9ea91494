"""The model families of sd-scripts: how each caches latents, and its trainers.

Source: the `LatentsCachingStrategy` classes of kohya-ss/sd-scripts 0.10.1 to 0.12 (names, keys, shapes, types), the
encoders they call (scaling), and the calls of `verify_bucket_reso_steps` in its trainers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.latents.families import MODEL_FAMILIES, ModelFamily
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.trainers.door.programs import Programs

NEEDED = "kohya_bucket needs sd-scripts 0.10.1 or newer"


@dataclass(frozen=True, kw_only=True)
class Family(ModelFamily):
    """How sd-scripts caches one model family. Early caches of a `per_channel` one have an axis of length 1 after the
    channels, which is dropped when they are read.

    Attributes:
        suffix: end of the file's name.
        multi_resolution: keys end in the latent's size, and one file holds several.
        plain_until: the last version of sd-scripts whose keys had no size, so that a file held one resolution; "" for
            families whose keys always had one, "0" for those of a fork that never have one. Newer versions still read
            such files.
        values: whether the file holds "raw" latents or ones already "scaled".
        trainers: its trainers, each by the file's name and what `bucket_reso_steps` must be a multiple of there, as the
            newest sd-scripts has it.
    """

    suffix: str
    multi_resolution: bool = True
    plain_until: str = ""
    values: str = "raw"
    trainers: tuple[tuple[str, int], ...] = ()

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

    def read_by(self, version: str) -> Family:
        """The family as a version of sd-scripts reads it, such as "0.10.1" or "0.11"; "" is the newest. Raises
        `KohyaBucketError` for anything but a version, or one that is too old."""
        if not version:
            return self
        if not is_version(version):
            raise KohyaBucketError(f"{version!r} is not a version of sd-scripts: use one such as 0.10.1 or 0.11")
        if is_too_old(version):
            raise KohyaBucketError(f"sd-scripts {version}: {NEEDED}")
        return self.with_sizes(version_numbers(version) > version_numbers(self.plain_until))

    def with_sizes(self, sized: bool) -> Family:
        """The same family with keys that have a size or none, where there are both."""
        return replace(self, multi_resolution=sized) if self.plain_until else self


def is_version(text: str) -> bool:
    """Whether this is a version of sd-scripts, as "0.10.1" or "v0.11"."""
    return re.fullmatch(r"v?\d+(\.\d+)*", text) is not None


def is_too_old(version: str) -> bool:
    """Whether no version of that number, or series such as "0.10", is one that is supported."""
    numbers = version_numbers(version)
    return numbers < (0, 10, 1)[: len(numbers)]


def version_numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version such as "v0.10.6" begins with; () where there are none."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(map(int, match[1].split("."))) if match else ()


def _family(name: str, suffix: str, trainers: Mapping[str, int], plain_until: str = "", values: str = "raw") -> Family:
    common, files = vars(MODEL_FAMILIES[name]), tuple(trainers.items())
    return Family(**common, suffix=suffix, plain_until=plain_until, values=values, trainers=files)


# the Flux autoencoder scales in its own encode, SD3 and HunyuanImage scale when they train, Anima's normalizes
# each channel by a mean and a standard deviation
ARCHITECTURES = {
    f.name: f
    for f in (
        _family("sd", "_sd.npz", {
            "train_network.py": 64, "fine_tune.py": 64, "train_db.py": 64, "train_control_net.py": 64,
            "train_controlnet.py": 64, "train_textual_inversion.py": 64,
        }, plain_until="0.10.1"),
        _family("sdxl", "_sdxl.npz", {
            "sdxl_train_network.py": 32, "sdxl_train.py": 32, "sdxl_train_control_net.py": 32,
            "sdxl_train_control_net_lllite.py": 32, "sdxl_train_textual_inversion.py": 32,
        }, plain_until="0.10.1"),
        _family("sd3", "_sd3.npz", {"sd3_train_network.py": 32, "sd3_train.py": 8}),
        _family("flux", "_flux.npz", {
            "flux_train_network.py": 32, "flux_train.py": 16, "flux_train_control_net.py": 16,
        }, values="scaled"),
        _family("lumina", "_lumina.npz", {"lumina_train_network.py": 16, "lumina_train.py": 16}, values="scaled"),
        _family("hunyuan_image", "_hi.npz", {"hunyuan_image_train_network.py": 32}),
        _family("anima", "_anima.npz", {
            "anima_train_network.py": 16, "anima_train.py": 16, "anima_train_control_net_lllite.py": 16,
        }, values="scaled"),
    )
}  # fmt: skip


ANY_TRAINER = Programs("", {file: step for a in ARCHITECTURES.values() for file, step in a.trainers})


def trainer_named(word: str) -> Programs:
    """The trainers that a family's name (`sdxl`, `SD 1.5`) or a trainer's file (`flux_train.py`) stands for. Raises
    `ConfigError` with the nearest name where there is none."""
    by_name: dict[str, Programs] = {}
    for arch in ARCHITECTURES.values():
        for name in (arch.name, arch.title):
            by_name[_plain(name)] = Programs(f"{arch.title} trainers", dict(arch.trainers), arch.name)
        for file, step in arch.trainers:
            by_name[_plain(file)] = Programs(file, {file: step}, arch.name)
    programs = by_name.get(_plain(word.replace("\\", "/").rpartition("/")[2]))
    if programs is None:
        near = difflib.get_close_matches(_plain(word), by_name, n=1)
        hint = f"did you mean {near[0]}?" if near else "or a trainer's file, such as flux_train.py"
        raise ConfigError(
            f"--arch {word!r}: use one of {', '.join(ARCHITECTURES)}; {hint}; models of other trainers go with their "
            "configs, and one that your sd-scripts has besides with --sd-scripts, the folder of its checkout"
        )
    return programs


def families_refusing(step: int) -> str:
    """The families with trainers that stop at a `bucket_reso_steps`, and what they demand: "SD 1.5 (64), SDXL (32)"."""
    demands = {a.title: sorted({least for _, least in a.trainers if step % least}) for a in ARCHITECTURES.values()}
    return ", ".join(f"{title} ({' or '.join(map(str, steps))})" for title, steps in demands.items() if steps)


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower().removesuffix(".py"))
