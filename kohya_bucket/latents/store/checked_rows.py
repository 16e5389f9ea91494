"""Whether rows that a file states can be rows of a store: of the right types, and of what is really there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.dtypes import EXACT, LATENT_DTYPES
from kohya_bucket.latents.store.entries import arrow
from kohya_bucket.latents.store.shard_info import KINDS, ShardInfo

__all__ = ["MOST_NUMBER", "check_rows"]

MOST_NUMBER = 2**63 - 2**32  # so that there are numbers above it, see `Generations`
_POSITIVE = ("bucket_width", "bucket_height", "resized_width", "resized_height", "original_width", "original_height")
_PLACES = ("crop_left", "crop_top")
_DTYPES = (*LATENT_DTYPES, EXACT)
_TEXTS = ("source", "collection", "vae", "interpolation", "source_hash")


def check_rows(table: Any, shards: Mapping[str, ShardInfo]) -> None:
    """Look at rows, and at those that lie in `shards` also whether they are there.

    Raises:
        LatentStoreError: a value is missing or impossible; a row lies behind the end of its shard, or is of another
            kind than that. Rows of captions have nothing of pixels, so all such columns must be 0 there.
    """
    _, pc, _ = arrow()
    for name in table.column_names:
        if name != "caption" and table[name].null_count:
            raise LatentStoreError(f"its column {name} has rows without a value")
    if not len(table):
        return
    kind = _codes(table, "kind", KINDS)
    _refuse(kind < 0, kind, "kind")
    texts = kind == KINDS.index("text")
    names = (*_POSITIVE, *_PLACES, "written_ns", "row", "mask_row")
    numbers = {name: np.asarray(table[name].to_numpy()) for name in names}
    for name in _POSITIVE:
        _refuse(np.where(texts, numbers[name] != 0, numbers[name] < 1), numbers[name], name)
    for name in _PLACES:
        _refuse(texts & (numbers[name] != 0), numbers[name], name)
    _refuse((numbers["written_ns"] < 0) | (numbers["written_ns"] > MOST_NUMBER), numbers["written_ns"], "written_ns")
    for side in ("left", "top", "right", "bottom"):
        values = np.asarray(table[f"ltrb_{side}"].to_numpy())
        _refuse(~np.isfinite(values) | (texts & (values != 0)), values, f"ltrb_{side}")
    for name in _TEXTS:
        column = table[name].unify_dictionaries().combine_chunks()
        if pc.any(pc.match_substring(getattr(column, "dictionary", column), "\0")).as_py():
            raise LatentStoreError(f"its column {name} has a text with a zero in it")
    _check_places(table, shards, numbers, texts)


def _check_places(
    table: Any, shards: Mapping[str, ShardInfo], numbers: Mapping[str, npt.NDArray[Any]], texts: npt.NDArray[np.bool_]
) -> None:
    column = table["shard"].unify_dictionaries().combine_chunks()
    infos = [shards.get(name) for name in column.dictionary.to_pylist()]
    at = np.asarray(column.indices)
    here = np.array([info is not None for info in infos], dtype=bool)[at]

    def of_shards(value: Any) -> npt.NDArray[Any]:
        return np.asarray(np.array([0 if info is None else value(info) for info in infos])[at])

    row, mask_row = numbers["row"], numbers["mask_row"]
    _refuse(here & ((row < 0) | (row >= of_shards(lambda info: info.rows))), row, "row")
    masks = of_shards(lambda info: info.tensors["alpha_mask"].shape[0] if "alpha_mask" in info.tensors else 0)
    mask = np.asarray(table["mask"].to_numpy())
    _refuse(here & ((mask_row < -2) | (mask_row >= masks) | ((mask_row == -2) == mask)), mask_row, "mask_row")
    flip = np.asarray(table["flip"].to_numpy())
    flipped = of_shards(lambda info: any(name.endswith("_flipped") for name in info.tensors)).astype(bool)
    _refuse((here & flip & ~flipped) | (texts & flip), flip, "flip")
    _refuse(texts & mask, mask, "mask")
    kind, dtype = _codes(table, "kind", KINDS), _codes(table, "dtype", _DTYPES)
    _refuse(here & (kind != of_shards(lambda info: KINDS.index(info.kind))), kind, "kind")
    stored = of_shards(lambda info: _DTYPES.index(EXACT if info.arrays else info.latents.dtype))
    exact = dtype == _DTYPES.index(EXACT)
    _refuse((dtype < 0) | (exact != texts) | (here & (dtype != stored)), dtype, "dtype")


def _codes(table: Any, name: str, known: Sequence[str]) -> npt.NDArray[Any]:
    """Position in `known` of each row's word, -1 where it is none of them."""
    words = table[name].unify_dictionaries().combine_chunks()
    codes = np.array([known.index(word) if word in known else -1 for word in words.dictionary.to_pylist()])
    return np.asarray(codes[np.asarray(words.indices)])


def _refuse(bad: npt.NDArray[np.bool_], values: npt.NDArray[Any], name: str) -> None:
    if bad.any():
        raise LatentStoreError(f"its column {name} has the impossible value {values[int(bad.argmax())]}")
