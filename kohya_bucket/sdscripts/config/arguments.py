"""The trainer's command line options that a dataset config falls back to, with their defaults.

Source: sd-scripts' `add_dataset_arguments` and `add_training_arguments`. An option counts only where the config is
silent: subset > dataset > general > command line > default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kohya_bucket.errors import ConfigError

__all__ = ["DEFAULTS", "arguments", "config_name", "parse_resolution"]

_OTHER_NAMES = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"}

DEFAULTS: Mapping[str, Any] = {
    "alpha_mask": False,
    "batch_size": 1,
    "bucket_no_upscale": False,
    "bucket_reso_steps": 64,
    "cache_info": False,
    "caption_dropout_every_n_epochs": 0,
    "caption_dropout_rate": 0.0,
    "caption_extension": ".caption",
    "caption_prefix": None,
    "caption_separator": ",",
    "caption_suffix": None,
    "caption_tag_dropout_rate": 0.0,
    "color_aug": False,
    "debug_dataset": False,
    "enable_bucket": False,
    "enable_wildcard": False,
    "face_crop_aug_range": None,
    "flip_aug": False,
    "keep_tokens": 0,
    "keep_tokens_separator": "",
    "max_bucket_reso": 1024,
    "min_bucket_reso": 256,
    "num_repeats": 1,
    "prior_loss_weight": 1.0,
    "random_crop": False,
    "resize_interpolation": None,
    "resolution": None,
    "secondary_separator": None,
    "shuffle_caption": False,
    "skip_image_resolution": None,
    "token_warmup_min": 1,
    "token_warmup_step": 0,
    "train_inpainting": False,
    "validation_seed": None,
    "validation_split": 0.0,
}


def config_name(name: str) -> str:
    """How the config calls a command line option."""
    return _OTHER_NAMES.get(name, name)


def arguments(given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The defaults with the given options over them; names as on the command line (`vars(namespace)` will do).

    Options that datasets do not read are left out; None counts as not given.
    """
    out = dict(DEFAULTS)
    for name, value in (given or {}).items():
        key = config_name(name)
        if value is not None and key in out:
            out[key] = value
    for key in ("resolution", "skip_image_resolution"):
        if isinstance(out[key], (str, int)):
            out[key] = parse_resolution(out[key], key)
    return out


def parse_resolution(text: str | int, name: str = "resolution") -> tuple[int, int]:
    """`512`, `512,768` or `512x768` as (width, height); sd-scripts has the first two.

    `name` is the option's, for messages.

    Raises:
        ConfigError: anything else.
    """
    parts = re.split("[,x×*]", str(text).lower())
    try:
        sides = [int(part) for part in parts]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ConfigError(f"{name} is {text!r}, but must be a size like 512 or a width and height like 512,768")
    return sides[0], sides[-1]
