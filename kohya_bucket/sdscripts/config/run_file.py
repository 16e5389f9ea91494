"""A trainer's settings in one file: what `--config_file` reads, or a preset that a GUI keeps.

Source: `read_config_from_file` in sd-scripts, and the settings that the kohya_ss GUI saves and hands over. The GUI has
names of its own for some of them, writes numbers as text, and leaves out what is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kohya_bucket.adapter.config_source import Source
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.architectures import ARCHITECTURES
from kohya_bucket.sdscripts.config.arguments import DEFAULTS, config_name

__all__ = ["RunFile", "run_file"]

_TELLING = {
    "dataset_config", "train_data_dir", "pretrained_model_name_or_path", "max_resolution", "resolution",
    "train_batch_size", "network_module", "LoRA_type", "learning_rate", "output_dir",
}  # fmt: skip
_GUI_NAMES = {"max_resolution": "resolution", "image_folder": "train_data_dir"}
_NO_OPTIONS = {"batch_size", "num_repeats"}  # are called otherwise on the command line; the GUI's are for other things
_FAMILY_OF_BOX = {
    "sdxl": "sdxl", "sdxl_checkbox": "sdxl", "flux1_checkbox": "flux", "sd3_checkbox": "sd3",
    "lumina_checkbox": "lumina", "hunyuan_image_checkbox": "hunyuan_image", "anima_checkbox": "anima",
}  # fmt: skip
_FINE_TUNING = {"dataset_repeats", "create_buckets", "use_latent_files"}  # the GUI's fine-tuning has no other kind


@dataclass(frozen=True)
class RunFile:
    """What such a file says of the data.

    Attributes:
        dataset_config: a dataset config, which then says which images there are.
        train_data_dir, reg_data_dir, in_json: folders and metadata, where there is no dataset config.
        given: the options that datasets read, as on the command line.
        family: the model family, where the file shows it; see `ARCHITECTURES`.
    """

    dataset_config: str | None
    train_data_dir: str | None
    reg_data_dir: str | None
    in_json: str | None
    given: Mapping[str, Any]
    family: str = ""


def run_file(source: Source, findings: Findings) -> RunFile | None:
    """What a file says that is no dataset config; None for one that is, or that is neither.

    Raises:
        ConfigError: a value that the trainer could not compute with.
    """
    if "datasets" in source.data:
        return None
    preset = source.path is not None and source.path.suffix.lower() == ".json"
    settings = _flat(source.data)
    if not _TELLING & settings.keys():
        return None
    if "kohya_bucket" in source.data:
        findings.warning(
            "table-not-read", "", "[kohya_bucket] is ignored in a file for --config_file",
            "put it into the dataset config, or into a file that the environment variable KOHYA_BUCKET_CONFIG names",
        )  # fmt: skip
    family = _family(settings)
    if preset:
        settings = _as_the_gui_hands_over(settings)
    given = {
        name: _value(source, name, value, preset)
        for name, value in settings.items()
        if config_name(name) in DEFAULTS and name not in _NO_OPTIONS
    }
    dataset_config, train_data_dir, reg_data_dir, in_json = (
        _path(source, name, settings) for name in ("dataset_config", "train_data_dir", "reg_data_dir", "in_json")
    )
    return RunFile(dataset_config, train_data_dir, reg_data_dir, in_json, given, family)


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are only headings there: sd-scripts takes what they hold as if it stood outside."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        if name != "kohya_bucket":
            out.update(value if isinstance(value, dict) else {name: value})
    return out


def _as_the_gui_hands_over(settings: Mapping[str, Any]) -> dict[str, Any]:
    out = {_GUI_NAMES.get(name, name): value for name, value in settings.items() if value not in ("", None, False)}
    if _FINE_TUNING & settings.keys():
        out["enable_bucket"] = True
        folder, file = settings.get("train_dir"), settings.get("caption_metadata_filename")
        if settings.get("use_latent_files") == "Yes":
            file = settings.get("latent_metadata_filename")
        if folder and file:
            out["in_json"] = f"{folder}/{file}"
    return out


def _family(settings: Mapping[str, Any]) -> str:
    for box, family in _FAMILY_OF_BOX.items():
        if settings.get(box) is True:
            return family
    module = str(settings.get("network_module", "")).rpartition(".")[2]
    return next((name for name in ARCHITECTURES if module == f"lora_{name}"), "")


def _value(source: Source, name: str, value: Any, preset: bool) -> Any:
    """A number as datasets compute with it; a preset may have it as text."""
    usual = DEFAULTS[config_name(name)]
    if isinstance(usual, bool) or usual is None or not isinstance(usual, (int, float)):
        return value
    wanted = int if isinstance(usual, int) else float
    number: float | None = None
    if not isinstance(value, bool) and (preset or not isinstance(value, str)):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = None
    if number is None or not -1e9 < number < 1e9:
        raise ConfigError(f"{source.path}: {name} is {value!r}, but must be a number like {usual}")
    return wanted(number)


def _path(source: Source, name: str, settings: Mapping[str, Any]) -> str | None:
    value = settings.get(name)
    if value in (None, ""):
        return None
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{source.path}: {name} is {value!r}, but must be a path")
    return value
