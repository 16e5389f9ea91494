"""The options that make a bucket rule: one set of names, defaults and meanings for every command that has them.

They are sd-scripts' keys and those of the `[kohya_bucket]` table, and make the rule that a dataset config with these
keys is trained by. What is not given is what sd-scripts takes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kohya_bucket.buckets.choices import NO_UPSCALE_FITS, SWITCHING_METHODS, described
from kohya_bucket.buckets.rules.registry import named_rule, rule_choices
from kohya_bucket.errors import ConfigError

if TYPE_CHECKING:
    from kohya_bucket.adapter.dataset_keys import DatasetKeys
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.buckets.sizes import IntArray

__all__ = ["RuleOptions"]


def _rules() -> str:
    return described(rule_choices())


@dataclass(frozen=True)
class RuleOptions:
    """What a command line says about the rule; each field is an option.

    The defaults are sd-scripts' (`sdscripts.config.keys.DEFAULTS`). Its trainers have none for `resolution` and
    want it given; 512 is that of its own program that sorts images into buckets, `prepare_buckets_latents.py`.
    """

    rule: Annotated[str | None, typer.Option(help="{}. Default: kohya."), _rules] = None
    preset: Annotated[str | None, typer.Option("--preset", "-p", help="A bundled bucket set, e.g. sdxl.")] = None
    bucket_config: Annotated[
        Path | None, typer.Option("--bucket-config", "-c", help="A bucket set in a TOML or JSON file.")
    ] = None
    resolution: Annotated[str, typer.Option(help="As in sd-scripts: 512 or 832,1216.")] = "512"
    min_bucket_reso: Annotated[int, typer.Option(help="As in sd-scripts.")] = 256
    max_bucket_reso: Annotated[int, typer.Option(min=1, help="As in sd-scripts; must not be below the resolution.")] = (
        1024
    )
    bucket_reso_steps: Annotated[int, typer.Option(help="As in sd-scripts.")] = 64
    bucket_no_upscale: Annotated[
        bool, typer.Option("--bucket-no-upscale", "--no-upscale", help="As in sd-scripts.")
    ] = False
    switching: Annotated[
        str | None, typer.Option(help="{}. Default: the rule's own."), partial(described, SWITCHING_METHODS)
    ] = None
    no_upscale_fit: Annotated[str, typer.Option(help="{}."), partial(described, NO_UPSCALE_FITS)] = "kohya"
    max_crop: Annotated[
        float | None, typer.Option(help="Largest share of an image that may be cropped off, e.g. 0.05.")
    ] = None
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="Number of buckets for the rule auto.")] = 8

    @property
    def name(self) -> str:
        """The one rule that is named, as `rule_from_name` takes it."""
        named = {
            "--rule": self.rule,
            "--preset": None if self.preset is None else f"preset:{self.preset}",
            "--bucket-config": None if self.bucket_config is None else f"file:{self.bucket_config}",
        }
        given = [option for option, name in named.items() if name is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both name a bucket set: give one of them")
        return str(named[given[0]]) if given else "kohya"

    @property
    def fields(self) -> tuple[str, ...]:
        """The options' names; without that of the bucket set, which may be a dataset config, where there is none."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if name != "bucket_config" or self.bucket_config is not None)

    @property
    def brings_sizes(self) -> bool:
        """Whether the rule is a set of sizes, which no resolution, limit or step decides."""
        return named_rule(self.name).own_sizes

    @property
    def from_images(self) -> bool:
        """Whether the rule is made from all images."""
        return named_rule(self.name).from_images

    @property
    def size(self) -> tuple[int, int]:
        """The resolution as (width, height). `ConfigError` for what is none."""
        from kohya_bucket.sdscripts.config.keys import parse_resolution

        return parse_resolution(self.resolution)

    @property
    def keys(self) -> DatasetKeys:
        """The same as the keys of a dataset.

        Raises:
            BucketSettingsError: sd-scripts would stop at them, whatever the rule; says which and what to change.
        """
        from kohya_bucket.adapter.dataset_keys import DatasetKeys, rule_for

        limits = self.min_bucket_reso, self.max_bucket_reso, self.bucket_reso_steps
        keys = DatasetKeys(self.size, True, *limits, self.bucket_no_upscale)
        rule_for(keys)
        return keys

    @property
    def limits(self) -> tuple[int, int]:
        """Shortest and longest side of a bucket, rounded to the step as sd-scripts does."""
        from kohya_bucket.adapter.dataset_keys import adjust_to_steps

        return adjust_to_steps(self.keys)

    def make(self, sizes: IntArray | None = None, *, auto_method: str = "kmeans") -> BucketRule:
        """The rule. `sizes` [N, 2] are for those that are made from the data.

        Raises:
            KohyaBucketError: there is no such rule, or the options cannot work together.
        """
        from kohya_bucket.adapter.dataset_keys import rule_for
        from kohya_bucket.adapter.options import AdapterOptions
        from kohya_bucket.buckets import rule_from_name

        own: dict[str, Any] = {
            "switching": self.switching, "no_upscale_fit": self.no_upscale_fit, "max_crop": self.max_crop,
        }  # fmt: skip
        if self.brings_sizes:
            return rule_from_name(self.name, max_reso=self.size, no_upscale=self.bucket_no_upscale, **own)
        table = AdapterOptions(rule=self.name, num_buckets=self.num, auto_method=auto_method, **own)
        return rule_for(self.keys, table, sizes)
