"""The options that rules have beyond sd-scripts' keys, and how a table of options declares them.

`RuleOptions` is the one list: `rule_from_name`, the `[kohya_bucket]` table and the command line take their options from
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from kohya_bucket.buckets.choices import AUTO_METHODS, NO_UPSCALE_FITS, SWITCHING_METHODS, described

Check = Callable[[Any], str]
"""What a value must be, or an empty string where it is that."""


def option(default: Any, check: Check, read: Callable[[Any], Any] = lambda value: value, **about: Any) -> Any:
    """A field that refuses what `check` says something about, and keeps what `read` makes of the value in a file."""
    return field(default=default, metadata={"check": check, "read": read, **about})


def choice(default: str | None, known: Callable[[], Iterable[str]], **about: Any) -> Any:
    """A field that is one of some names; those that are registered later than this is read are found too."""
    return field(default=default, metadata={"known": known, "read": lambda value: value, **about})


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def share(value: Any) -> str:
    return "" if is_number(value) and 0 <= value < 1 else "a share from 0 to less than 1, e.g. 0.05"


def whole_number(least: int) -> Check:
    def check(value: Any) -> str:
        good = isinstance(value, int) and is_number(value) and value >= least
        return "" if good else f"a whole number above {least - 1}"

    return check


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """What a user may choose for a rule.

    A field's metadata has `help`, the text of its option on the command line, `spelled`, further spellings there,
    `usual` for one that `--help` shows, and `implied`, the values with which a rule that does not accept the option
    does the same as without it; options without `implied` are never refused.

    Attributes:
        switching: where one bucket hands over to the next: `midpoint`, `geometric` or `area`; by default the rule's
            own: midpoint for `kohya` and `novelai`, geometric for the others.
        no_upscale_fit: with `bucket_no_upscale`, `largest` keeps the most of each image's pixels where sd-scripts
            (`kohya`) sometimes takes a smaller bucket than would fit.
        max_crop: largest share of an image that may be cropped off, e.g. 0.05; images beyond it are moved to a
            better bucket or left out by name.
        token_tolerance: by how much of its tokens an image of rule `token_band` may differ from the resolution, e.g.
            0.05.
        num_buckets: how many buckets rule `auto` makes.
        auto_method: how rule `auto` finds them: `kmeans` or `optimal`.
    """

    switching: str | None = choice(
        None, lambda: SWITCHING_METHODS, implied=(None, "midpoint"),
        help=lambda: f"{described(SWITCHING_METHODS)}. Default: the rule's own.",
    )  # fmt: skip
    no_upscale_fit: str = choice(
        "kohya", lambda: NO_UPSCALE_FITS, implied=("kohya",), help=lambda: f"{described(NO_UPSCALE_FITS)}."
    )
    max_crop: float | None = option(
        None, share, implied=(None,), usual=True, help="Most that may be cut off, e.g. 0.05."
    )
    token_tolerance: float = option(
        0.05, share, implied=(0.05,), help="For token_band: a bucket's tokens differ by at most this share."
    )
    num_buckets: int = option(
        8, whole_number(1), spelled=("--num-buckets", "--num", "-n"), usual=True, help="How many the rule auto makes."
    )
    auto_method: str = choice("kmeans", lambda: AUTO_METHODS)

    @classmethod
    def names(cls) -> list[str]:
        """The names of the options of rules, without those that a class derived from this one adds."""
        return [one.name for one in fields(RuleOptions)]

    def of_rules(self) -> dict[str, Any]:
        """These options by name, as keyword arguments of `rule_from_name`."""
        return {name: getattr(self, name) for name in self.names()}
