"""What a file of a whole run says: the trainer's own config file, or a preset of the kohya_ss GUI.

Source: `read_config_from_file` in sd-scripts, and the settings that the GUI saves and hands over. The GUI has names of
its own for some of them, writes numbers as text, and leaves out what is empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from kohya_bucket.checks import LOADER_OPTIONS, loader_mistake
from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.config_source import FLAG, ONE_OR_MORE, TEXT, WHOLE, ConfigSource, check_range
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.sdscripts.config.keys import DEFAULTS, KEYS, config_name
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES

FOLDERS = ("train_data_dir", "reg_data_dir", "in_json")
_Number = TypeVar("_Number", int, float)
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
_TEXT_CACHE_OF_BOX = {
    "sdxl": "sdxl", "sdxl_checkbox": "sdxl", "flux1_checkbox": "flux1", "sd3_checkbox": "sd3",
}  # fmt: skip
_FINE_TUNING = {"dataset_repeats", "create_buckets", "use_latent_files"}  # the GUI's fine-tuning has no other kind
_DEFAULT_STEPS = 1600


@dataclass(frozen=True)
class RunLength:
    """How long a trainer's settings let it train; a number that they do not give is 0.

    Attributes:
        epochs: those of the GUI, from which it computes steps; sd-scripts does not read them.
        max_train_epochs, max_train_steps: sd-scripts' options; the first one counts where both are given.
        batches: how many make one step, `gradient_accumulation_steps`.
        processes: how many the GUI starts; 1 where the file does not say.
        computed: the GUI computes `max_train_steps`, from images x repeats / batch size x epochs.
    """

    epochs: int = 0
    max_train_epochs: int = 0
    max_train_steps: int = 0
    batches: int = 1
    computed: bool = False
    processes: int = 1

    @classmethod
    def from_settings(cls, source: ConfigSource, settings: Mapping[str, Any], preset: bool) -> RunLength:
        """Of the settings in a file, of which a preset may have numbers as text."""
        names = ("epoch", "max_train_epochs", "max_train_steps", "gradient_accumulation_steps", "num_processes")
        numbers = (_number(source, name, settings.get(name, 0) or 0, preset, 0) for name in names)
        epochs, most, steps, batches, processes = numbers
        computed = preset and bool(epochs) and not (most or steps)
        return cls(epochs, most, steps, max(batches, 1), computed, max(processes, 1) if preset else 1)

    def text(self, updates: int, unit: str) -> str:
        """See `TrainingLength`; sd-scripts calls updates of the weights steps."""
        epochs = self.max_train_epochs or self.epochs or 1
        total = f"{epochs:,} epoch{'s' * (epochs != 1)} = {counted(epochs * updates, unit)}"
        if self.max_train_epochs:
            over = self.max_train_steps and self.max_train_steps != epochs * updates
            return total + (f"; max_train_epochs counts, not max_train_steps {self.max_train_steps}" if over else "")
        limit = self.max_train_steps or _DEFAULT_STEPS
        by = ", as the GUI computes it," if self.computed else "" if self.max_train_steps else ", sd-scripts' default,"
        last = -(-limit // max(updates, 1))
        return f"{total}; max_train_steps {limit}{by} ends {'in' if limit % max(updates, 1) else 'with'} epoch {last:,}"


class RunSettings(NamedTuple):
    """What a trainer's settings say.

    Attributes:
        paths: `dataset_config` and the folders by name, each None where it is not named.
        options: those that datasets read, as on the command line.
        family: of the model, where the settings show it, see `ARCHITECTURES`; else "".
        length: how long they train.
    """

    paths: dict[str, str | None]
    options: dict[str, Any]
    family: str
    length: RunLength


def run_file(source: ConfigSource, findings: Findings) -> RunSettings | None:
    """The settings in a file that is not a dataset config; None for one that is, or that is neither.

    Raises:
        ConfigError: a value that the trainer could not compute with.
    """
    preset = source.path is not None and source.path.suffix.lower() == ".json"
    settings = without_headings(source.data)
    if "datasets" in source.data or not _TELLING & settings.keys():
        return None
    if "kohya_bucket" in source.data:
        findings.warning(
            "table-not-read", "", "[kohya_bucket] is ignored in a file for --config_file",
            "put it into the dataset config, or into a file that the environment variable KOHYA_BUCKET_CONFIG names",
        )  # fmt: skip
    family = _family(settings)
    if preset:
        settings = _as_the_gui_hands_over(settings)
    if any(str(one).strip().lower() == "train_t5xxl=true" for one in _listed(settings.get("network_args"))):
        settings = {**settings, "train_t5xxl": True}
    options = {
        name: _value(source, name, value, preset)
        for name, value in settings.items()
        if config_name(name) in DEFAULTS and name not in _NO_OPTIONS
    }
    _check_training(source, settings, preset, findings)
    paths = {name: _path(source, name, settings) for name in ("dataset_config", *FOLDERS)}
    return RunSettings(paths, options, family, RunLength.from_settings(source, settings, preset))


def _check_training(source: ConfigSource, settings: Mapping[str, Any], preset: bool, findings: Findings) -> None:
    """Name what PyTorch's loader or accelerate stops at: sd-scripts takes from a file what no option could be."""
    table = {name: head for head, inner in source.data.items() if isinstance(inner, dict) for name in inner}

    def place(name: str) -> str:
        return source.line_of(*((table[name], name) if name in table else (name,))).rstrip(", ")

    workers = _number(source, _WORKERS, settings.get(_WORKERS, 8), preset, 8)
    loader = {
        "num_workers": 1 if settings.get("deepspeed") else workers,
        "persistent_workers": settings.get(_PERSISTENT),
    }
    if wrong := loader_mistake(loader, LOADER_OPTIONS):
        findings.error("loader", place(_PERSISTENT if _PERSISTENT in settings else _WORKERS), *wrong)
    name = "gradient_accumulation_steps"
    check_range(name, _number(source, name, settings.get(name, 1), preset, 1), ONE_OR_MORE, place(name), findings)
    name, precision = "mixed_precision", settings.get("mixed_precision", "no")
    if precision not in _PRECISIONS:
        message = f"{name} is {precision!r}, but must be one of {', '.join(_PRECISIONS)}"
        findings.error("mixed-precision", place(name), message)


_WORKERS, _PERSISTENT = LOADER_OPTIONS["num_workers"], LOADER_OPTIONS["persistent_workers"]
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_OF_RUNS = {"pretrained_model_name_or_path", "network_module", "LoRA_type", "output_dir"}


def without_settings(source: ConfigSource, findings: Findings) -> ConfigSource:
    """A dataset config without the settings of a trainer that stand in it, which are one mistake."""
    of_datasets = {name: source.data[name] for name in source.data if name in ("general", "datasets", "kohya_bucket")}
    others = {name: value for name, value in source.data.items() if name not in of_datasets}
    if "datasets" not in of_datasets or not _OF_RUNS & without_headings(others).keys():
        return source
    message = (
        f"{some(list(others))}: settings of a trainer, which a dataset config (--dataset_config) does not have; and in "
        "a file for --config_file sd-scripts does not read [[datasets]]"
    )
    remedy = "make two files: one with [general] and [[datasets]] for --dataset_config, and one with the rest"
    findings.error("misplaced-key", source.line_of(next(iter(others))).rstrip(", "), message, remedy, list(others))
    return replace(source, data=of_datasets)


def without_headings(data: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a file for `--config_file`: sd-scripts takes what its tables hold as if it stood outside."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        if name != "kohya_bucket":
            out.update(value if isinstance(value, dict) else {name: value})
    return out


def _as_the_gui_hands_over(settings: Mapping[str, Any]) -> dict[str, Any]:
    out = {_GUI_NAMES.get(name, name): value for name, value in settings.items() if value not in ("", None, False)}
    for box, name in _TEXT_CACHE_OF_BOX.items():
        for kind in ("", "_to_disk") if settings.get(box) is True else ():
            if settings.get(f"{name}_cache_text_encoder_outputs{kind}") is True:
                out[f"cache_text_encoder_outputs{kind}"] = True
    if settings.get("LoRA_type"):
        out["network_module"] = "of the GUI"
        out["network_train_unet_only"] = not _rate(settings.get("text_encoder_lr"))
    elif settings.get("sdxl") is True or settings.get("sdxl_checkbox") is True:
        out["train_text_encoder"] = any(_rate(settings.get(f"learning_rate_te{n}")) for n in (1, 2))
    if _FINE_TUNING & settings.keys():
        out["enable_bucket"] = True
        folder, file = settings.get("train_dir"), settings.get("caption_metadata_filename")
        if settings.get("use_latent_files") == "Yes":
            file = settings.get("latent_metadata_filename")
        if folder and file:
            out["in_json"] = f"{folder}/{file}"
    return out


def _rate(value: Any) -> bool:
    """Whether a preset's learning rate, a number or a text, is one."""
    with suppress(TypeError, ValueError):
        return float(value) > 0
    return False


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else str(value or "").split()


def _family(settings: Mapping[str, Any]) -> str:
    for box, family in _FAMILY_OF_BOX.items():
        if settings.get(box) is True:
            return family
    module = str(settings.get("network_module", "")).rpartition(".")[2]
    return next((name for name in ARCHITECTURES if module == f"lora_{name}"), "")


def _value(source: ConfigSource, name: str, value: Any, preset: bool) -> Any:
    """A number as datasets compute with it; a preset may have it as text."""
    usual = DEFAULTS[config_name(name)]
    if config_name(name) in ("resolution", "skip_image_resolution"):
        # sd-scripts splits a text at its comma, and ends with AttributeError at a number; the GUI writes texts.
        text = str(value) if preset or isinstance(value, str) else ""
        if not re.fullmatch(r"[\s\d,]+", text):
            shape = "a size like 512 or 512,768" if preset else "a size like '512' or '512,768', in quotes"
            raise ConfigError(f"{source.path}: {name} is {value!r}, but must be {shape}")
    wanted = KEYS[config_name(name)].type
    if preset and wanted is FLAG and value in (0, 1):  # as a box that is ticked or not
        return bool(value)
    if wanted in (TEXT, FLAG) and value is not None and not wanted.fits(value):
        raise ConfigError(f"{source.path}: {name} is {value!r}, but must be {wanted.text}")
    if isinstance(usual, bool) or not isinstance(usual, (int, float)):
        return value
    return _number(source, name, value, preset, usual if wanted is WHOLE else float(usual))


def _number(source: ConfigSource, name: str, value: Any, preset: bool, usual: _Number) -> _Number:
    number = math.nan
    if not isinstance(value, bool) and isinstance(value, (int, float, str) if preset else (int, float)):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not -1e9 < number < 1e9:
        raise ConfigError(f"{source.path}: {name} is {value!r}, but must be a number like {usual}")
    if isinstance(usual, int) and not number.is_integer():
        raise ConfigError(f"{source.path}: {name} is {value!r}, but must be a whole number like {usual}")
    return type(usual)(number)


def _path(source: ConfigSource, name: str, settings: Mapping[str, Any]) -> str | None:
    value = settings.get(name)
    if value in (None, ""):
        return None
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{source.path}: {name} is {value!r}, but must be a path")
    return value
