"""Why what is cached does not serve: one vocabulary, by which code decides, and whose words are for people."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Reason", "Stale", "as_text"]


class Stale(enum.Enum):
    """Kinds of reasons, for latents and outputs of text encoders. The values are what a reason's details go into."""

    MISSING = "not encoded yet"
    GONE = "the image is gone"

    # made from something else
    SOURCE = "the image changed ({})"
    OTHER_SOURCE = "it was made from {}"
    OLDER = "the image is newer than its cache, which does not say what it was made from"
    IMAGE_SIZE = "it is of an image of {}x{}, not {}x{}"
    VAE = "the VAE's weights changed ({} -> {})"
    BUCKET = "the bucket changed ({} -> {})"
    RESIZED = "the resized size changed ({} -> {})"
    CROP = "the crop changed ({} -> {})"
    INTERPOLATION = "the interpolation changed ({} -> {})"
    DTYPE = "the dtype changed ({} -> {})"
    KIND = "the kind changed ({} -> {})"
    CLIP = "the config does not ask for {} frames from {} on"
    OPTION = "{} changed ({} -> {})"
    FLIP = "the flipped latent is missing"
    MASK = "the alpha mask is missing"
    CAPTION = "the caption changed"
    ENCODERS = "the text encoders changed"
    TOKENS = "how captions are encoded changed ({} -> {})"
    DROPOUT = "the caption_dropout_rate changed ({:g} -> {:g})"

    # the file
    BROKEN = "it is broken ({})"
    CUT_OFF = "its {} is cut off"
    CHECKSUM = "the checksum of {} is wrong"
    PART = "it has no {}"
    SHAPE = "its {} has shape {}, not {}"


@dataclass(frozen=True, init=False)
class Reason:
    """One reason, with what its text names."""

    kind: Stale
    details: tuple[Any, ...]

    def __init__(self, kind: Stale, *details: Any) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "details", details)

    def __str__(self) -> str:
        return self.kind.value.format(*self.details)

    @property
    def brief(self) -> str:
        """The text without what is in brackets."""
        return self.kind.value.partition(" (")[0].format(*self.details)


def as_text(reasons: Iterable[Reason]) -> str:
    """All reasons in one line."""
    return "; ".join(map(str, reasons))
