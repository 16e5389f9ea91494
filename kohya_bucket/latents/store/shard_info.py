"""What a store knows of a shard, and whether what a file states of one can be true.

A reader takes nothing on trust: its tensors belong together, mean what is said, and lie in the file.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.dtypes import LATENT_DTYPES, STORED_AS
from kohya_bucket.latents.latent_space import LatentSpace
from kohya_bucket.latents.store.shard_file import MOST_AXES, TensorSpec

__all__ = ["KINDS", "MOST_UNPACKED", "SPANS", "ShardInfo", "given_arrays"]

KINDS = ("latents", "posterior", "text")
SPANS = "spans"  # [N, arrays, 3] int64: the first row in the array's tensor, how many rows, how many once unpacked
MOST_UNPACKED = 1 << 30  # bytes of one array of a caption, which takes less in the file


@dataclass(frozen=True)
class ShardInfo:
    """A shard's file: name, length in bytes, where its tensors lie, and what they mean.

    Of outputs of text encoders, `arrays` has each array's numpy type and number of axes, as they were given, and
    `tensors` has one tensor of that name with the rows of all items, and `SPANS`.
    """

    name: str
    nbytes: int
    tensors: dict[str, TensorSpec]
    space: LatentSpace
    arrays: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Items in it, those included that newer ones have replaced."""
        return (self.tensors[SPANS] if self.arrays else self.latents).shape[0]

    @property
    def latents(self) -> TensorSpec:
        """The tensor of its latents, or of mean and standard deviation.

        Raises:
            LatentStoreError: it holds outputs of text encoders.
        """
        if self.arrays:
            raise LatentStoreError(f"shard {self.name} holds outputs of text encoders, not latents")
        return self.tensors[self.kind]

    @property
    def is_posterior(self) -> bool:
        """Its rows hold mean and standard deviation instead of latents."""
        return self.kind == "posterior"

    @property
    def kind(self) -> str:
        """What its rows are, one of `KINDS`."""
        return "text" if self.arrays else "posterior" if "posterior" in self.tensors else "latents"

    def to_json(self) -> dict[str, Any]:
        places = {name: [spec.dtype, list(spec.shape), spec.offset] for name, spec in self.tensors.items()}
        more = {"arrays": {name: list(given) for name, given in self.arrays.items()}} if self.arrays else {}
        return {"name": self.name, "bytes": self.nbytes, "tensors": places, "space": asdict(self.space)} | more

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ShardInfo:
        """What `to_json` gave, from a file that anybody may have changed.

        Raises:
            ValueError, TypeError, KeyError: there can be no such shard.
        """
        specs = {name: TensorSpec.of(*spec) for name, spec in data["tensors"].items()}
        return cls(data["name"], data["bytes"], specs, LatentSpace.of(data["space"]), given_arrays(data)).checked()

    def checked(self) -> ShardInfo:
        """The same, if its tensors belong together and lie in the file; else `ValueError`."""
        _check_shard(self)
        return self


def given_arrays(data: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """`ShardInfo.arrays` as a shard or a manifest states it; empty for latents."""
    return {name: (given, axes) for name, (given, axes) in data.get("arrays", {}).items()}


def _check_shard(info: ShardInfo) -> None:
    """Look at the description of a shard.

    Raises:
        ValueError, TypeError: there can be no such shard.
    """
    if info.arrays:
        _check_texts(info)
    else:
        _check_latents(info)
    if type(info.nbytes) is not int or any(s.offset + s.nbytes > info.nbytes for s in info.tensors.values()):
        raise ValueError(f"shard {info.name!r} of {info.nbytes!r} bytes cannot hold its tensors")


def _check_latents(info: ShardInfo) -> None:
    found = dict(info.tensors)
    mask = found.pop("alpha_mask", None)
    main = found.pop(info.kind, None)
    flipped = found.pop(f"{info.kind}_flipped", main)
    if found or main is None or main.dtype not in LATENT_DTYPES or len(main.shape) != 4 + info.is_posterior:
        raise ValueError(f"shard {info.name!r} cannot hold the tensors {sorted(info.tensors)}")
    if info.space.values == "text":
        raise ValueError(f"shard {info.name!r} holds latents, but its note says text outputs")
    if info.is_posterior and main.shape[1] != 2:
        raise ValueError(f"shard {info.name!r} holds no mean and deviation, but a shape of {list(main.shape)}")
    if flipped is None or (flipped.dtype, flipped.shape) != (main.dtype, main.shape) or not main.nbytes:
        raise ValueError(f"shard {info.name!r} holds mirrored latents of another shape")
    if mask is not None and (mask.dtype != "uint8" or len(mask.shape) != 3):
        raise ValueError(f"shard {info.name!r} holds masks of type {mask.dtype} and shape {list(mask.shape)}")


def _check_texts(info: ShardInfo) -> None:
    found = dict(info.tensors)
    spans = found.pop(SPANS, None)
    # sorted: by their order the columns of `SPANS` belong to them
    if found.keys() != info.arrays.keys() or list(info.arrays) != sorted(info.arrays) or info.space.values != "text":
        raise ValueError(f"shard {info.name!r} cannot hold the tensors {sorted(info.tensors)} of {list(info.arrays)}")
    if spans is None or spans.dtype != "int64" or spans.shape[1:] != (len(found), 3) or not spans.nbytes:
        raise ValueError(f"shard {info.name!r} does not say which rows belong to which text")
    for name, (given, axes) in info.arrays.items():
        spec = found[name]
        if not isinstance(given, str) or spec.dtype not in STORED_AS.get(given, ()):
            raise ValueError(f"shard {info.name!r} cannot hold {name!r} of type {given!r} as {spec.dtype}")
        # of any length, and 0 is no divisor of a limit: each axis counts as 1 at least
        widest = 8 * math.prod(max(1, side) for side in spec.shape[1:])
        if type(axes) is not int or not 0 <= axes <= MOST_AXES or len(spec.shape) != max(1, axes):
            raise ValueError(f"shard {info.name!r} cannot hold {name!r} of {axes!r} axes as {list(spec.shape)}")
        if widest > MOST_UNPACKED:
            raise ValueError(f"shard {info.name!r} cannot hold {name!r} of shape {list(spec.shape)}")
