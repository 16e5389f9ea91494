"""What needs a part of sd-scripts that looks unknown, and is refused before it costs a night."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.seams import Owners
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import pip_install
from kohya_bucket.sdscripts.resuming.initial_step import OPTIONS
from kohya_bucket.texts import parse_toml, read_text

__all__ = ["given_options", "refuse_what_needs"]


class _Shards(NamedTuple):
    """An option that may be "shards", and what that stands on."""

    option: str
    subject: str
    seam: str
    what: str

    @property
    def text(self) -> str:
        return f"[kohya_bucket] {self.option} = 'shards'"


_SHARDS = (
    _Shards("latent_cache", "caching", "BaseDataset.new_cache_latents", "latents"),
    _Shards("text_cache", "text-caching", "BaseDataset.new_cache_text_encoder_outputs", "text-encoder outputs"),
)


def refuse_what_needs(unknown: Mapping[str, Any], options: AdapterOptions, owners: Owners) -> None:
    """Refuse options and arguments that a subject must be known for, or a package installed.

    Args:
        unknown: {subject: `Unknown`} of what is left to sd-scripts.
        owners: what it defines.
        options: the `[kohya_bucket]` table.

    Raises:
        ConfigError: with what is asked for, and what is not known.
    """
    given = given_options(sys.argv[1:])
    shards = [kind for kind in _SHARDS if getattr(options, kind.option) == "shards"]
    needs = {kind.subject: [kind.text] for kind in shards}
    if options.several_sizes:
        several = [name for name in ("cache_latents", "cache_latents_to_disk") if name in given]
        needs.setdefault("caching", []).extend(f"--{name} with several sizes for an image" for name in several)
    needs["resuming"] = [f"--{name}" for name in ("resume", *OPTIONS) if name in given]
    for subject, asked in needs.items():
        if subject in unknown and asked:
            raise ConfigError(
                f"{asked[0]} needs a part of sd-scripts that looks different from every known version: "
                f"{'; '.join(unknown[subject].problems)}. Leave it out, or update kohya-bucket"
            )
    for kind in shards:
        if not owners.has(kind.seam):
            raise ConfigError(
                f"{kind.text} needs a sd-scripts that caches {kind.what} by strategies (0.10 or newer), which this is "
                "not. Leave it out: this version's own cache is used"
            )
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(
                f"{kind.text} needs pyarrow, which is not installed here: {pip_install('parquet')}, or leave it out"
            )


def given_options(arguments: Sequence[str]) -> set[str]:
    """Names of the options on a trainer's command line, and in the file that its `--config_file` names.

    A switch that is off in that file counts as not given.
    """
    given = {argument[2:].partition("=")[0] for argument in arguments if argument.startswith("--")}
    for here, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if here.startswith("--config_file"):
            given |= _of_file(here.partition("=")[2] or after)
    return given


def _of_file(name: str) -> set[str]:
    path = Path(name if name.endswith(".toml") else name + ".toml")
    try:
        table = parse_toml(read_text(path))
    except (OSError, ValueError):
        return set()  # the trainer says what is wrong with it
    flat = dict(table)
    for value in table.values():
        if isinstance(value, dict):
            flat |= value
    return {key for key, value in flat.items() if value not in (None, False, "")}
