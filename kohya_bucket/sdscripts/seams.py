"""The places in sd-scripts that the adapter takes hold of, and what each must look like.

All are checked before one is touched. A place that looks different means a version this adapter does not
know: then nothing is replaced, and the error names the version and every such place.
"""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kohya_bucket.errors import KohyaBucketError

__all__ = ["SeamError", "check_seams", "describe_checkout", "describe_folder", "is_sd_scripts"]


class SeamError(KohyaBucketError):
    """sd-scripts looks different from every version this adapter knows; nothing was replaced."""


def is_sd_scripts(train_util: ModuleType) -> bool:
    """Whether a module called `library.train_util` is sd-scripts' (other projects use that name too)."""
    return hasattr(train_util, "BaseDataset") and hasattr(train_util, "DreamBoothDataset")


def check_seams(train_util: ModuleType, config_util: ModuleType, data_loader: type) -> list[str]:
    """Names of all seams, in the order in which they are checked.

    Raises:
        SeamError: with every seam that is missing or different.
    """
    owners = {"train_util": train_util, "config_util": config_util, "DataLoader": data_loader}
    names, problems = [], []
    has_strategies = hasattr(getattr(train_util, "BaseDataset", None), "new_cache_latents")
    for owner, path, checks in _seams() + (_caching_seams() if has_strategies else []):
        names.append(f"{owner}.{path}")
        problem = _problem(owners[owner], path, checks)
        if problem:
            problems.append(f"{names[-1]} {problem}")
    if problems:
        raise SeamError(
            f"sd-scripts {describe_checkout(train_util)} is not a version this adapter knows, so nothing was "
            f"replaced: {'; '.join(problems)}. Update kohya-bucket, or train without it"
        )
    return names


def describe_checkout(train_util: ModuleType) -> str:
    """The checkout's version as git tells it, and its folder."""
    return describe_folder(Path(train_util.__file__ or ".").resolve().parent.parent)


def describe_folder(root: Path) -> str:
    """The same of the checkout in a folder."""
    try:
        git = ["git", "-C", str(root), "describe", "--tags", "--always"]
        answer = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
        return f"{answer.stdout.strip()} at {root}"
    except (OSError, subprocess.SubprocessError):
        return f"of unknown version at {root}"


def _seams() -> list[tuple[str, str, list[Callable[[Any], str]]]]:
    """(module, path within it, what must hold there)."""
    train, config, torch = "train_util", "config_util", "DataLoader"
    manager_settings = ("no_upscale", "max_reso", "min_size", "max_size", "reso_steps")
    info_fields = ("image_key", "num_repeats", "absolute_path", "image_size", "resized_size", "bucket_reso")
    dataset_state = ("image_data", "image_to_subset", "bucket_manager", "bucket_info", "current_epoch", "seed")
    bucket_state = ("bucket_manager", "bucket_info", "buckets_indices", "batch_size", "_length")
    bucket_switches = ("image_data", "enable_bucket", "bucket_no_upscale")
    entry_fields = ("bucket_index", "bucket_batch_size", "batch_index")
    loader_arguments = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn")
    delegate = "dreambooth_dataset_delegate"
    return [
        (train, "BucketManager.__init__", [_takes(*manager_settings)]),
        (train, "BucketManager.select_bucket", [_takes("image_width", "image_height")]),
        (train, "BucketManager.get_crop_ltrb", [_takes("bucket_reso", "image_size")]),
        (train, "BucketBatchIndex", [_has_fields(*entry_fields)]),
        (train, "ImageInfo.__init__", [_uses(*info_fields)]),
        (train, "BaseDataset.__init__", [_uses(*dataset_state)]),
        (train, "BaseDataset.make_buckets", [_takes(), _uses(*bucket_switches, *bucket_state)]),
        (train, "BaseDataset.shuffle_buckets", [_takes()]),
        (train, "BaseDataset.set_current_epoch", [_takes("epoch")]),
        (train, "BaseDataset.get_image_size", [_takes("image_path")]),
        (
            train,
            "BaseDataset.cache_latents",
            [_takes_among("vae", "vae_batch_size", "cache_to_disk"), _uses("image_data")],
        ),
        (
            train,
            "BaseDataset.__getitem__",
            [_takes("index"), _uses("bucket_manager", "buckets", "buckets_indices", *entry_fields)],
        ),
        (train, "ControlNetDataset.make_buckets", [_uses(delegate, "buckets_indices")]),
        (train, "ControlNetDataset.__getitem__", [_uses(delegate, "bucket_manager", "buckets_indices")]),
        (train, "DatasetGroup", [_inherits_getitem]),
        (train, "DatasetGroup.set_current_epoch", [_takes("epoch")]),
        (
            train,
            "DatasetGroup.cache_latents",
            [_takes_among("vae", "vae_batch_size", "cache_to_disk"), _uses("datasets")],
        ),
        (train, "glob_images", [_takes("directory", "base"), _uses("IMAGE_EXTENSIONS")]),
        (train, "prepare_accelerator", [_takes("args")]),
        (train, "collator_class.__init__", [_takes("epoch", "step", "dataset")]),
        (train, "collator_class.__call__", [_uses("current_epoch", "set_current_epoch")]),
        (config, "ConfigSanitizer.sanitize_user_config", [_takes("user_config")]),
        (torch, "__init__", [_takes_among(*loader_arguments)]),
    ]


def _caching_seams() -> list[tuple[str, str, list[Callable[[Any], str]]]]:
    """The same for versions with caching strategies (since 0.10)."""
    train, strategy = "train_util", "LatentsCachingStrategy"
    saved = ("npz_path", "latents_tensor", "original_size", "crop_ltrb", "flipped_latents_tensor", "alpha_mask")
    return [
        (train, "BaseDataset.new_cache_latents", [_takes("model", "accelerator")]),
        (train, "BaseDataset.new_cache_text_encoder_outputs", [_takes("models", "accelerator")]),
        (train, f"{strategy}.get_strategy", [_takes("cls")]),
        (train, f"{strategy}.get_latents_npz_path", [_takes("absolute_path", "image_size")]),
        (
            train,
            f"{strategy}.is_disk_cached_latents_expected",
            [_takes("bucket_reso", "npz_path", "flip_aug", "alpha_mask")],
        ),
        (train, f"{strategy}.save_latents_to_disk", [_takes(*saved, "key_reso_suffix")]),
        (train, f"{strategy}.load_latents_from_disk", [_takes("npz_path", "bucket_reso")]),
        (train, "TextEncoderOutputsCachingStrategy.get_outputs_npz_path", [_takes("image_abs_path")]),
        (train, "TextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected", [_takes("npz_path")]),
    ]


def _problem(owner: Any, path: str, checks: list[Callable[[Any], str]]) -> str:
    for part in path.split("."):
        if not hasattr(owner, part):
            return "does not exist"
        owner = inspect.getattr_static(owner, part) if inspect.isclass(owner) else getattr(owner, part)
    return ", ".join(filter(None, (check(owner) for check in checks)))


def _parameters(function: Any) -> list[str]:
    function = getattr(function, "__func__", function)
    return [p for p in inspect.signature(function).parameters if p != "self"]


def _takes(*expected: str) -> Callable[[Any], str]:
    def check(function: Any) -> str:
        try:
            found = _parameters(function)
        except (TypeError, ValueError):
            return "is not a function of its own"
        return "" if found == list(expected) else f"takes ({', '.join(found)}), expected ({', '.join(expected)})"

    return check


def _takes_among(*expected: str) -> Callable[[Any], str]:
    def check(function: Any) -> str:
        missing = set(expected) - set(_parameters(function))
        return f"does not take {', '.join(sorted(missing))}" if missing else ""

    return check


def _uses(*expected: str) -> Callable[[Any], str]:
    """The function's own code reads or writes these attributes."""

    def check(function: Any) -> str:
        code = getattr(function, "__code__", None)
        if code is None:
            return "is not a function of its own"
        missing = set(expected) - set(code.co_names)
        return f"does not use {', '.join(sorted(missing))}" if missing else ""

    return check


def _has_fields(*expected: str) -> Callable[[Any], str]:
    def check(named_tuple: Any) -> str:
        found = getattr(named_tuple, "_fields", ())
        return "" if found == expected else f"has the fields {found}, expected {expected}"

    return check


def _inherits_getitem(group: Any) -> str:
    return "has a __getitem__ of its own" if "__getitem__" in vars(group) else ""
