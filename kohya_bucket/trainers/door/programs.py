"""What advice about buckets has to hold for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kohya_bucket.buckets.families import family_named


@dataclass(frozen=True)
class Programs:
    """What advice has to hold for: one program of a trainer, those of one model family, or all.

    Attributes:
        title: what messages call it; "" where none is named.
        steps: {program: what the sides of its buckets must be multiples of}.
        family: the name of theirs, as `buckets/families.py` has it; "" for none.
    """

    title: str
    steps: Mapping[str, int]
    family: str = ""

    @property
    def step(self) -> int:
        """The least step that all of them accept."""
        return math.lcm(*self.steps.values())

    def refusing(self, step: int) -> dict[str, int]:
        """Those that stop at this step, with what they demand."""
        return {program: least for program, least in self.steps.items() if step % least}

    def longest(self, resolution: tuple[int, int], step: int) -> int:
        """The usual longest side of a bucket at a resolution: where it is lower, ordinary aspects lose pixels."""
        usual = family_named(self.family).max_size if self.family else 0
        longest = max(usual, 2 * math.isqrt(resolution[0] * resolution[1]), *resolution)
        return -(-longest // step) * step

    def as_in(self, steps: Mapping[str, int]) -> Programs:
        """The same with the steps that a checkout's programs have; those that it lacks do not count."""
        present = {program: steps[program] for program in self.steps if program in steps}
        return replace(self, steps=present) if present else self
