"""What an unknown key was probably meant to be, and where it belongs."""

from __future__ import annotations

import difflib

from kohya_bucket.sdscripts.config.release import NEWEST, Release
from kohya_bucket.sdscripts.config.schema import ALL, KEYS, Kind, Level, Supports, known_keys

__all__ = ["levels_of", "nearest_key", "remedy_for"]

# Names that mean the same elsewhere: sd-scripts' own command line, its folder options, the GUI, musubi-tuner.
_OTHER_NAMES = {
    "train_batch_size": "batch_size",
    "dataset_repeats": "num_repeats",
    "repeats": "num_repeats",
    "caption_extention": "caption_extension",
    "caption_ext": "caption_extension",
    "train_data_dir": "image_dir",
    "image_directory": "image_dir",
    "img_dir": "image_dir",
    "path": "image_dir",
    "in_json": "metadata_file",
    "image_jsonl_file": "metadata_file",
    "control_directory": "conditioning_data_dir",
    "instance_prompt": "class_tokens",
    "width": "resolution",
    "height": "resolution",
    "bucket": "enable_bucket",
    "enable_buckets": "enable_bucket",
    "min_bucket_resolution": "min_bucket_reso",
    "max_bucket_resolution": "max_bucket_reso",
    "bucket_reso_step": "bucket_reso_steps",
    "no_upscale": "bucket_no_upscale",
    "caption_dropout_every_n_epoch": "caption_dropout_every_n_epochs",
}

# Options of the trainers that are often put into the dataset config.
_TRAINER_OPTIONS = frozenset(
    [
        "cache_latents",
        "cache_latents_to_disk",
        "cache_text_encoder_outputs",
        "cache_text_encoder_outputs_to_disk",
        "vae_batch_size",
        "skip_cache_check",
        "debug_dataset",
        "dataset_class",
        "reg_data_dir",
        "prior_loss_weight",
        "max_token_length",
        "max_train_steps",
        "max_train_epochs",
        "max_data_loader_n_workers",
        "persistent_data_loader_workers",
        "seed",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "mixed_precision",
        "full_fp16",
        "full_bf16",
        "learning_rate",
        "unet_lr",
        "text_encoder_lr",
        "lr_scheduler",
        "lr_warmup_steps",
        "optimizer_type",
        "optimizer_args",
        "network_module",
        "network_dim",
        "network_alpha",
        "network_args",
        "network_weights",
        "output_dir",
        "output_name",
        "save_every_n_epochs",
        "save_every_n_steps",
        "save_model_as",
        "save_precision",
        "pretrained_model_name_or_path",
        "vae",
        "v2",
        "v_parameterization",
        "clip_skip",
        "noise_offset",
        "min_snr_gamma",
        "sample_prompts",
        "sample_every_n_epochs",
        "sample_every_n_steps",
        "logging_dir",
        "log_with",
        "xformers",
        "sdpa",
        "lowram",
        "resume",
        "masked_loss",
        "weighted_captions",
        "train_inpainting",
        "dataset_config",
        "config_file",
    ]
)


def nearest_key(name: str, known: set[str]) -> str | None:
    """The known key that `name` was probably meant to be, or None if none resembles it."""
    plain = name.strip().strip("=").strip().lower().replace("-", "_").replace(" ", "_")
    for candidate in (plain, _OTHER_NAMES.get(plain, ""), _snake(name)):
        if candidate in known:
            return candidate
    close = difflib.get_close_matches(plain, sorted(known), n=1, cutoff=0.7)
    if not close:
        joined = {key.replace("_", ""): key for key in sorted(known)}
        close = [joined[m] for m in difflib.get_close_matches(plain.replace("_", ""), joined, n=1, cutoff=0.75)]
    return close[0] if close else None


def levels_of(key: str, kind: Kind | None, supports: Supports = ALL, release: Release = NEWEST) -> list[Level]:
    """The tables in which `key` is known, for datasets of this kind (of any kind if None)."""
    kinds = [kind] if kind else list(Kind)
    return [
        level
        for level in (Level.GENERAL, Level.DATASET, Level.SUBSET)
        if any(key in known_keys(level, k, supports, release) for k in kinds)
    ]


def remedy_for(
    name: str, level: Level, kind: Kind | None, supports: Supports = ALL, release: Release = NEWEST
) -> tuple[str, str]:
    """`(what, remedy)` for a key that is not allowed in this table: why it is not, and what to do."""
    if name == "kohya_bucket":
        return "the [kohya_bucket] table stands at the top level only", "move it out, as [kohya_bucket]"
    if name in KEYS:
        since = KEYS[name].since
        if since and since not in release:
            what = f"{name!r} is new in sd-scripts {since.since}, and {release.name} does not know it"
            return what, "remove it or update sd-scripts"
        if kind is not None and kind not in KEYS[name].kinds and levels_of(name, None, supports, release):
            kinds = sorted(k.value for k in KEYS[name].kinds)
            return f"{name!r} is for {' and '.join(kinds)} datasets; this is a {kind.value} dataset", "remove it"
        homes = levels_of(name, kind, supports, release)
        if homes:
            return f"{name!r} does not belong in {level.value}", f"move it to {_either(homes)}"
        return f"this trainer does not read {name!r}", "remove it"
    here = known_keys(level, kind, supports, release)
    near = nearest_key(name, here)
    if near:
        return f"there is no key {name!r}", f"did you mean {near!r}?"
    near = nearest_key(name, set(KEYS))
    if near:
        homes = levels_of(near, kind, supports, release) or levels_of(near, None, supports, release)
        return f"there is no key {name!r}", f"did you mean {near!r}? It belongs in {_either(homes)}"
    if name.replace("-", "_") in _TRAINER_OPTIONS:
        return (
            f"{name!r} is an option of the trainer, not of a dataset",
            f"give it on the command line (--{name.replace('-', '_')}) or in the --config_file",
        )
    return f"there is no key {name!r}", f"remove it; {level.value} knows {', '.join(sorted(here))}"


def _either(levels: list[Level]) -> str:
    return " or ".join(level.value for level in levels)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
