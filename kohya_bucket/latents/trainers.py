"""What the trainers of a model family demand of buckets, and which of them a word names."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.architectures import ARCHITECTURES

__all__ = ["ANY_TRAINER", "NAME_THE_MODEL", "Trainer", "families_refusing", "trainer_named"]


@dataclass(frozen=True)
class Trainer:
    """What advice has to hold for: one trainer of sd-scripts, those of one family, or all.

    Attributes:
        title: what messages call it; "" for all trainers, of which nobody said which is meant.
        steps: {file: what `bucket_reso_steps` must be a multiple of}.
        max_bucket_reso: the family's usual one; 0 for twice the resolution.
    """

    title: str
    steps: Mapping[str, int]
    max_bucket_reso: int = 0

    @property
    def step(self) -> int:
        """The least step that all of them accept."""
        return math.lcm(*self.steps.values())

    def refusing(self, step: int) -> dict[str, int]:
        """Those that stop at this `bucket_reso_steps`, with what they demand."""
        return {file: least for file, least in self.steps.items() if step % least}

    def longest(self, resolution: tuple[int, int], step: int) -> int:
        """The usual `max_bucket_reso` at a resolution: where it is lower, ordinary aspects lose pixels."""
        sides = 2 * math.isqrt(resolution[0] * resolution[1])
        longest = max(self.max_bucket_reso, sides, *resolution)
        return -(-longest // step) * step

    def as_in(self, steps: Mapping[str, int]) -> Trainer:
        """The same with the steps that a checkout's trainers have; files that it lacks do not count."""
        there = {file: steps[file] for file in self.steps if file in steps}
        return replace(self, steps=there) if there else self


ANY_TRAINER = Trainer("", {file: step for a in ARCHITECTURES.values() for file, step in a.trainers})


NAME_THE_MODEL = f"name your model, for advice that fits it: --arch {', '.join(ARCHITECTURES)}"


def trainer_named(word: str) -> Trainer:
    """The trainers that a family's name (`sdxl`, `SD 1.5`) or a trainer's file (`flux_train.py`) stands for.

    Raises:
        ConfigError: there is none, with the nearest that is.
    """
    known: dict[str, Trainer] = {}
    for arch in ARCHITECTURES.values():
        for name in (arch.name, arch.title):
            known[_plain(name)] = Trainer(f"{arch.title} trainers", dict(arch.trainers), arch.max_bucket_reso)
        for file, step in arch.trainers:
            known[_plain(file)] = Trainer(file, {file: step}, arch.max_bucket_reso)
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
