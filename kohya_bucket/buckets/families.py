"""What people set for a model family of sd-scripts: the resolution of its buckets and their limits, by one word."""

from __future__ import annotations

from typing import NamedTuple

from kohya_bucket.checks import one_of
from kohya_bucket.errors import ConfigError


class FamilyBuckets(NamedTuple):
    """Values for `KohyaBuckets`, in pixels.

    Attributes:
        title: for people.
        resolution: side of the square whose area no bucket exceeds.
        min_size, max_size: shortest and longest side. With a longest side below twice the resolution, ordinary aspects
            lose pixels.
        reso_steps: every side is a multiple of this, which all trainers of the family accept.
    """

    title: str
    resolution: int = 1024
    min_size: int = 256
    max_size: int = 2048
    reso_steps: int = 64


FAMILIES = {
    "sd": FamilyBuckets("SD 1.5", 512, max_size=1024),  # sd-scripts' defaults, at which every command and page begins
    "sdxl": FamilyBuckets("SDXL, Illustrious, Pony"),
    "sd3": FamilyBuckets("SD 3.5"),
    "flux": FamilyBuckets("FLUX.1"),
    "lumina": FamilyBuckets("Lumina"),
    "hunyuan_image": FamilyBuckets("HunyuanImage"),
    "anima": FamilyBuckets("Anima"),
}

NAME_THE_MODEL = f"name your model, for advice that fits it: --arch {', '.join(FAMILIES)}"


def _plain(name: str) -> str:
    plain = "".join(c for c in name.lower() if c.isalnum())
    return "sd" if plain == "sd15" else plain


_PLAIN = {_plain(name): name for name in FAMILIES}


def family_named(arch: str) -> FamilyBuckets:
    """The values of a family, e.g. "sdxl" or "SD 1.5".

    Raises:
        ConfigError: there is no such family, with the nearest.
    """
    return FAMILIES[_PLAIN.get(_plain(arch)) or one_of("arch", arch, FAMILIES, ConfigError)]


def is_family(arch: str) -> bool:
    """Whether `family_named` knows it."""
    return _plain(arch) in _PLAIN
