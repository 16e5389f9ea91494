"""What a plan was made from, as plain values: to compare ranks, and to refuse a resume on other data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from os.path import commonprefix
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import digest
from kohya_bucket.errors import PlanError

PLAN_VERSION = 3
"""Goes up with every change by which equal settings give another plan."""


def digest_of(values: npt.ArrayLike | None) -> str | None:
    """Short digest of an array's values, whatever its integer width; None for None."""
    if values is None:
        return None
    array = np.asarray(values)
    if array.dtype == object:
        return digest(" ".join(map(str, array.reshape(-1).tolist())))
    if array.dtype.kind in "iu":
        top = max(int(array.max(initial=0)), -int(array.min(initial=0)))
        array = array.astype("<i1" if top < 1 << 7 else "<i2" if top < 1 << 15 else "<i8", copy=False)
    else:
        array = array.astype("<u1" if array.dtype.kind == "b" else "<f8")
    return digest(repr(array.shape), np.ascontiguousarray(array).data)


NAMES = "image_names"
"""Key of `digest_of_names`, which says what image each number stands for; None or left out where that is not known."""
OTHER_NAMES = "images have other names or are in another order"


def names_below(names: Sequence[str]) -> list[str]:
    """Names as every machine has them: behind the folder that all are in, with the separators of POSIX."""
    listed = list(names)
    common = commonprefix([min(listed), max(listed)]) if listed else ""  # noqa: RUF071 (of texts of any system)
    begin = max(common.rfind("/"), common.rfind("\\")) + 1
    return [name[begin:].replace("\\", "/") for name in listed]


def digest_of_names(names: Sequence[str]) -> str:
    """Short digest of images' names in their order; the folder that all are in does not count."""
    return digest("\0".join(names_below(names)))


def fingerprint_of(
    bucket_ids: npt.NDArray[np.integer], per_bucket: npt.NDArray[np.int64], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain values, ready for JSON: digests of arrays, options as they are.

    `per_bucket` (images of each bucket) is kept as it is: by it, a difference can name the bucket.
    """
    plain = {
        key: value if np.ndim(value) == 0 or key == "global_batch" else digest_of(value)
        for key, value in options.items()
    }
    return {
        "plan_version": PLAN_VERSION,
        "images": len(bucket_ids),
        "images_per_bucket": [int(n) for n in per_bucket],
        "bucket_ids": digest_of(bucket_ids),
        **{key: value.item() if isinstance(value, np.generic) else value for key, value in plain.items()},
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> list[str]:
    """What differs between two fingerprints, in words; empty if nothing does."""
    texts = []
    for key in [*then, *(k for k in now if k not in then)]:
        a, b = then.get(key), now.get(key)
        if key in ignore or a == b or (key == NAMES and None in (a, b)):
            continue
        if key == "images_per_bucket":
            texts += _bucket_differences(a or [], b or [])
        elif key == "bucket_ids":
            if then.get("images_per_bucket") == now.get("images_per_bucket"):
                texts.append("images are in other buckets or in another order")
        elif key == "images":
            texts.append(f"{a} images, now {b}")
        elif key == NAMES:
            if then.get("images") == now.get("images"):
                texts.append(OTHER_NAMES)
        elif _is_digest(a) and _is_digest(b):
            texts.append(f"other values of {key}")
        else:
            texts.append(f"{key} was {_shown(a)}, now {_shown(b)}")
    return texts


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 16 and set(value) <= set("0123456789abcdef")


def _shown(value: object) -> object:
    return "a list" if _is_digest(value) else value


def _bucket_differences(then: list[int], now: list[int]) -> list[str]:
    if len(then) != len(now):
        return [f"{len(then)} buckets, now {len(now)}"]
    changed = [k for k in range(len(then)) if then[k] != now[k]]
    shown = [f"bucket {k} had {then[k]} images, now {now[k]}" for k in changed[:3]]
    return shown + ([f"and {len(changed) - 3} more buckets"] if len(changed) > 3 else [])


Gather = Callable[[Mapping[str, Any]], list[Mapping[str, Any]]]
"""What every rank calls with its own values, and what gives each of them those of all, by rank."""


class RanksDifferError(PlanError):
    """The ranks are about to train different data, or the same in different ways."""


def agree(
    values: Mapping[str, Any],
    gather: Gather,
    what: str,
    remedy: str,
    *,
    deciding: str | None = None,
    ignore: tuple[str, ...] = (),
    names: Callable[[], Sequence[str]] = tuple,
) -> list[Mapping[str, Any]]:
    """The values of all ranks, which are the same ones.

    Args:
        values: those of this rank, plain ones: a fingerprint, and what belongs to it.
        gather: see `Gather`.
        what: another one of these a rank has: for the message.
        remedy: what to do, a sentence for the message.
        deciding: a key; where its values are equal, no other is looked at but `NAMES`. Left out of the message.
        ignore: keys whose values may differ.
        names: gives the names of this rank's images, for a message where their digests differ.

    Raises:
        RanksDifferError: they differ; every rank is told by the same message in what.
    """
    everyone = gather(values)
    first = everyone[0]
    hidden = (*ignore, NAMES) if deciding is None else (*ignore, NAMES, deciding)
    for rank, other in enumerate(everyone):
        alike = deciding is not None and other[deciding] == first[deciding]
        named, another = first.get(NAMES), other.get(NAMES)
        others_names = None not in (named, another) and named != another
        if alike and not others_names:
            continue
        differing = differences(first, other, ignore=hidden)
        if others_names:
            differing.append(_first_other_name(names_below(names()), gather, rank))
        if differing or deciding is not None:
            raise RanksDifferError(
                f"rank {rank} {what} than rank 0 (there, then on rank {rank}): "
                f"{'; '.join(differing) or 'only the steps differ'}. {remedy}"
            )
    return everyone


_BLOCK = 1024  # names that are compared by one digest, and then sent


def _first_other_name(names: Sequence[str], gather: Gather, rank: int) -> str:
    """The first image that has another name on a rank than on rank 0, in words; all ranks must call this."""
    digests = [digest("\0".join(names[i : i + _BLOCK])) for i in range(0, len(names), _BLOCK)]
    everyone = gather({"digests": digests})
    pairs = zip_longest(everyone[0]["digests"], everyone[rank]["digests"])
    begin = _BLOCK * next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    everyone = gather({"names": names[begin : begin + _BLOCK]})
    pairs = zip_longest(everyone[0]["names"], everyone[rank]["names"])
    differing = (f"image {i} is {_called(a)}, now {_called(b)}" for i, (a, b) in enumerate(pairs, begin) if a != b)
    return next(differing, OTHER_NAMES)


def _called(name: str | None) -> str:
    return "missing" if name is None else repr(name)
