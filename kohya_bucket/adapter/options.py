"""The `[kohya_bucket]` table: which options there are, where they come from, and what is refused.

Options stand in a `[kohya_bucket]` table of the dataset config, or in the file that the environment
variable `KOHYA_BUCKET_CONFIG` names (for runs without a dataset config). A key in the dataset config wins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.option_values import CHOICES, TABLE, check_together, expected_value, parsed
from kohya_bucket.checks import nearest, one_of
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.latents.architectures import TOKEN_GRIDS
from kohya_bucket.planning.remainders import policies_of
from kohya_bucket.texts import parse_json, parse_toml, read_text

__all__ = ["ENVIRONMENT_VARIABLE", "TABLE", "AdapterOptions", "environment_table"]

ENVIRONMENT_VARIABLE = "KOHYA_BUCKET_CONFIG"


@dataclass(frozen=True)
class AdapterOptions:
    """Options of the adapter. The defaults train what sd-scripts says it trains.

    Attributes:
        rule: what decides buckets: `kohya`, `novelai`, `exact`, `auto`, `preset:NAME` or `file:PATH`.
        switching: where one bucket hands over to the next: `midpoint`, `geometric` or `area`; by default the
            rule's own.
        no_upscale_fit: with `bucket_no_upscale`, `largest` keeps the most of each image's pixels where sd-scripts
            (`kohya`) sometimes takes a smaller bucket than would fit.
        max_crop: largest share of an image that may be cropped off, e.g. 0.05; images beyond it are moved to a
            better bucket or left out by name.
        num_buckets: how many buckets rule `auto` makes.
        auto_method: how rule `auto` finds them: `kmeans` or `optimal`.
        remainder: what happens to the images of a bucket that fill no batch: `keep` trains them as a short batch;
            `REMAINDERS` has the others, each with a text.
        small_buckets: with `drop`, what happens to buckets that never fill a batch: `keep` (the default) trains
            them in short batches; or any other remainder; `drop` never trains them.
        merge_max_crop: with `merge`, the largest share of an image that the move may crop off; where images must not
            be enlarged, pixels lost by scaling down count too.
        resolutions: train each image at several resolutions, e.g. [512, 768, [1024, 768]], in place of the
            datasets' own.
        resolution_mode: `all` trains each image at each resolution in each epoch, `rotate` at one per epoch in turn,
            `weighted` at one, in the shares of `resolution_weights`.
        resolution_weights: one number per resolution, for `weighted`: [3, 1] is three epochs out of four.
        order: `shuffled`, `runs` (several steps of one shape after another), or `local` (few shards of the latent
            cache at a time, for a store in object storage).
        run_length: steps of one shape in a row, with order `runs`.
        open_shards: shards that are being read at a time, with order `local`.
        max_pixels: bound of images x width x height for one process and step; small buckets then train larger
            batches, and `batch_size` is not used.
        max_tokens: the same in tokens that `model` makes of an image or a clip.
        max_cost: the same in cost: `cost` says of what.
        model: the transformer whose tokens and cost count, e.g. `flux` or `wan-1.3b`; `TOKEN_GRIDS` has them all.
        cost: [a, b], so that an image of L tokens costs a * L + b * L * L, as `kohya-bucket measure-cost` prints it;
            by default in tokens, with what the model's attention adds.
        same_shape: every process trains the same shape in a step. `cost`: where a bucket has too few batches for all
            processes, batches of nearly equal cost meet in a step, in place of repeats: of `model`, else of pixels.
            Switched off, each process has batches of its own, as in sd-scripts, and waits for the largest.
        on_bad_image: what happens to an image that turns out unreadable in training: `leave_out` names it and trains
            another of its bucket in its place; `stop` ends the run with one line.
        metadata_cache: where image sizes are kept between runs: `auto` (large data sets, in the user's cache
            folder), `off`, or a Parquet file.
        latent_cache: what --cache_latents_to_disk writes: `npz`, sd-scripts' own files and names, checked and
            written whole, or `shards`, a store of few files.
        text_cache: what --cache_text_encoder_outputs_to_disk writes: `npz`, or `shards`, in the folder `text` of the
            same store: each caption once, in the type that its encoder gave.
        latent_cache_dir: folder of the store; by default `kohya_bucket_latents` beside the first image of
            each data set.
    """

    rule: str = "kohya"
    switching: str | None = None
    no_upscale_fit: str = "kohya"
    max_crop: float | None = None
    num_buckets: int = 8
    auto_method: str = "kmeans"
    remainder: str = "keep"
    small_buckets: str | None = None
    merge_max_crop: float = 0.25
    resolutions: tuple[tuple[int, int], ...] | None = None
    resolution_mode: str = "all"
    resolution_weights: tuple[float, ...] | None = None
    order: str = "shuffled"
    run_length: int = 8
    open_shards: int = 64
    max_pixels: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    model: str | None = None
    cost: tuple[float, float] | None = None
    same_shape: bool | str = True
    on_bad_image: str = "leave_out"
    metadata_cache: str = "auto"
    latent_cache: str = "npz"
    text_cache: str = "npz"
    latent_cache_dir: str | None = None

    @property
    def has_budget(self) -> bool:
        """Whether batch sizes follow from a budget, and not from the trainer's own number."""
        return any(budget is not None for budget in (self.max_pixels, self.max_tokens, self.max_cost))

    @property
    def token_cost(self) -> tuple[float, float]:
        """(a, b) of the cost of an image."""
        if self.cost is not None or self.model is None:
            return self.cost or (1.0, 0.0)
        return TOKEN_GRIDS[self.model].token_cost

    @property
    def several_sizes(self) -> bool:
        """Whether an image may be trained at another size than its own bucket's."""
        return self.resolutions is not None or self.moves_images

    @property
    def moves_images(self) -> bool:
        """Whether `remainder` or `small_buckets` trains images in other buckets than their own."""
        return any(policy.moves_images for policy in policies_of(self.remainder, self.small_buckets))

    @classmethod
    def from_tables(cls, *tables: tuple[str, Mapping[str, Any]]) -> AdapterOptions:
        """Merge tables, later ones winning. Each comes with the place it was read from, for messages.

        Raises:
            ConfigError: an unknown key (with the nearest known one) or a value that is not allowed.
        """
        known = {f.name: f for f in fields(cls)}
        merged: dict[str, Any] = {}
        for place, table in tables:
            if not isinstance(table, Mapping):
                raise ConfigError(f"{place}: [{TABLE}] must be a table of options, got {table!r}")
            for key, value in table.items():
                if key not in known:
                    raise ConfigError(
                        f"{place}: [{TABLE}] has no option {key!r}; the nearest is {nearest(key, known)!r}. "
                        f"Known: {', '.join(sorted(known))}"
                    )
                where = f"{place}: [{TABLE}] {key}"
                if key in CHOICES:
                    one_of(where, value, CHOICES[key](), ConfigError)
                elif expected := expected_value(key, value):
                    raise ConfigError(f"{where} is {value!r}, but must be {expected}")
                merged[key] = parsed(key, value)
        check_together(merged)
        return cls(**merged)


def environment_table() -> list[tuple[str, Mapping[str, Any]]]:
    """The options of the file named by `KOHYA_BUCKET_CONFIG`: none, or one (place, table) pair.

    The file is TOML or JSON; options stand in a `[kohya_bucket]` table or at the top level.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    if not name:
        return []
    path = Path(name)
    place = f"{ENVIRONMENT_VARIABLE}={name}"
    if not path.exists():
        raise ConfigError(f"{place}: there is no such file; correct the variable or unset it")
    try:
        table = (parse_json if path.suffix.lower() == ".json" else parse_toml)(read_text(path))
    except KohyaBucketError as error:
        raise ConfigError(f"{place}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{place}: cannot be parsed: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: must hold a table of options, not {type(table).__name__}")
    return [(place, table.get(TABLE, table))]
