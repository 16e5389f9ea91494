"""What a config or a command line asks of a rule that it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["RuleRequest"]


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
    sizes: Any
    switching: str | None
    no_upscale_fit: str
    max_crop: float | None
    num_buckets: int
    auto_method: str

    @property
    def set_options(self) -> dict[str, Any]:
        """The keyword arguments that all rules with a set have; without `switching` it is the rule's own."""
        given = {} if self.switching is None else {"switching": self.switching}
        return {"no_upscale": self.no_upscale, "max_crop": self.max_crop, **given}
