"""What a config or a command line asks of a rule that it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["RuleRequest"]


class SetOptions(TypedDict, total=False):
    """What all rules with a set take."""

    no_upscale: bool
    max_crop: float | None
    switching: str


@dataclass(frozen=True)
class RuleRequest:
    """sd-scripts' keys and this package's options, as `rule_from_name` explains them.

    Attributes:
        argument: what stands after the colon of the name, e.g. that of the preset.
        sizes: [N, 2] sizes of the data; None where none were given.
    """

    argument: str
    max_reso: tuple[int, int]
    min_size: int
    max_size: int
    reso_steps: int
    no_upscale: bool
    sizes: npt.ArrayLike | None
    switching: str | None
    no_upscale_fit: str
    max_crop: float | None
    num_buckets: int
    auto_method: str

    @property
    def set_options(self) -> SetOptions:
        """The options for a rule with a set; without `switching` it is the rule's own."""
        options = SetOptions(no_upscale=self.no_upscale, max_crop=self.max_crop)
        if self.switching is not None:
            options["switching"] = self.switching
        return options
