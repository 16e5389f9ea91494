"""`read_job`: what a job of ai-toolkit trains, and what is wrong with it. No file beside it is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kohya_bucket.checks import loader_mistake
from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import counted, parse_json, read_text
from kohya_bucket.trainers.ai_toolkit.architectures import STEPS
from kohya_bucket.trainers.ai_toolkit.companions import IMAGES, Companions, check_editing, companions_in
from kohya_bucket.trainers.ai_toolkit.controls import RAW
from kohya_bucket.trainers.door.config_source import (
    FLAG,
    LARGEST,
    MOST_STRANGE,
    NUMBER,
    ONE_OR_MORE,
    TEXT,
    WHOLE,
    YAML,
    ConfigSource,
    Type,
    check_range,
    check_repeats,
    near_key,
    parse_yaml,
    read_table,
)
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.door.options import TABLE, AdapterOptions

_OTHER = """
alpha_mask audio_normalize audio_preserve_pitch augmentations augments bucket_tolerance
cache_clip_vision_to_disk cache_latents_num_workers cache_tensors_to_disk cache_text_embeddings
caption_dropout_rate caption_type clip_image_augmentations clip_image_from_same_folder clip_image_path
clip_image_shuffle_augmentations control_from_same_folder control_path control_path_1 control_path_2
control_path_3 control_transparent_color controls debug diff_output_preservation
diff_output_preservation_class do_audio do_i2v extra_values fps guidance_type
inpaint_path invert_mask keep_tokens load_image_when_caching_latents loss_multiplier mask_min_value mask_path
network_weight num_controls_from_same_folder num_workers poi prefetch_factor prior_reg random_scale
random_triggers random_triggers_max replacements replay_transforms shrink_video_to_frames shuffle_augmentations
shuffle_tokens standardize_images token_dropout_rate trim_auto_frame_count_tail type
unconditional_path use_short_captions
"""
OTHER_KEYS = frozenset(_OTHER.split())
"""What else a dataset may say: none of it decides a bucket or a batch."""


@dataclass(frozen=True)
class JobKeys:
    """One dataset at one resolution, as ai-toolkit names its keys, with its defaults.

    Attributes:
        number: which of the job's, from 1.
        source: a folder, or a JSON file whose keys are paths.
        companions: folders with files that belong to its images.
    """

    number: int
    source: str
    resolution: int = 512
    batch_size: int = 1
    num_repeats: int = 1
    scale: float = 1.0
    num_frames: int = 1
    caption_ext: str = ".txt"
    default_caption: str = ""
    trigger_word: str = ""
    buckets: bool = True
    square_crop: bool = False
    flip_x: bool = False
    flip_y: bool = False
    is_reg: bool = False
    fast_image_size: bool = False
    auto_frame_count: bool = False
    cache_latents: bool = False
    cache_latents_to_disk: bool = False
    random_crop: bool = False
    full_size_control_images: bool = True
    companions: Companions = ()

    @property
    def place(self) -> str:
        """What messages call it."""
        return f"dataset {self.number}, {self.resolution}"

    @property
    def of_clips(self) -> bool:
        """Whether clips are trained, beside images."""
        return self.num_frames > 1 or self.auto_frame_count

    @property
    def flips(self) -> list[tuple[bool, bool]]:
        """(across, upside down) of each turn in which an epoch trains every image."""
        across = [(False, False), (True, False)] if self.flip_x else [(False, False)]
        return across + [(flipped, True) for flipped, _ in across] if self.flip_y else across


_TYPES = {"bool": FLAG, "int": WHOLE, "float": NUMBER, "str": TEXT}
KEYS: dict[str, Type] = {"folder_path": TEXT, "dataset_path": TEXT} | {
    one.name: _TYPES[str(one.type)] for one in fields(JobKeys) if one.name not in ("number", "source", "companions")
}


@dataclass(frozen=True)
class JobLength:
    """How long a job trains: its `steps`."""

    steps: int

    def text(self, updates: int, unit: str) -> str:
        """See `TrainingLength`."""
        epochs, more = divmod(self.steps, max(updates, 1))
        rest = f" and {counted(more, unit)} of the next" if more else ""
        return f"{counted(self.steps, unit)} are {epochs:,} epoch{'s' * (epochs != 1)}{rest}"


@dataclass(frozen=True)
class JobConfig:
    """All that a job says of its datasets.

    Attributes:
        datasets: one for each resolution of each, in ai-toolkit's order.
        arch: the model's, as the job names it.
        raw_controls: the model takes control images in the sizes of their files.
        step: what every side of a bucket is a multiple of.
        accumulate: batches for one step.
        length: how long it trains; None where it does not say.
        options: those under its key `kohya_bucket`, over the environment's; None where a finding says what is wrong.
    """

    path: Path
    datasets: tuple[JobKeys, ...]
    arch: str
    raw_controls: bool
    step: int
    accumulate: int
    length: JobLength | None
    options: AdapterOptions | None
    findings: Findings


def is_job(data: Any) -> bool:
    """Whether a file holds a job of ai-toolkit."""
    return isinstance(data, Mapping) and "job" in data and isinstance(data.get("config"), Mapping)


def read_job(path: str | os.PathLike[str]) -> JobConfig:
    """Read a job, `.yaml`, `.yml` or `.json`.

    Raises:
        ConfigError: the file is not a job, or has no dataset. Everything else is in `findings`.
    """
    file, findings = Path(path), Findings()
    try:
        data = (parse_yaml if file.suffix.lower() in YAML else parse_json)(read_text(file))
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error
    if not is_job(data):
        raise ConfigError(f"{file} is not a job of ai-toolkit: it has no keys job and config")
    config = _named(data["config"])
    processes = [one for one in _list(config.get("process")) if isinstance(one, Mapping) and one.get("datasets")]
    if not processes:
        raise ConfigError(f"{file}: no process in it has datasets, so there is nothing to train")
    if len(processes) > 1:
        message = f"{len(processes)} processes have datasets; the first one is shown"
        findings.note("several-processes", "", message, "plan each in a file of its own")
    process = processes[0]
    sections = (process.get(name) for name in ("train", "model"))
    train, model = (one if isinstance(one, Mapping) else {} for one in sections)
    arch = _arch(model)
    step = STEPS.get(arch)
    if step is None:
        step = 16
        message = f"the model is {arch!r}, whose step is not known: buckets are shown in steps of 16"
        findings.warning("unknown-model", "", message, "ai-toolkit prints the sizes of its buckets: compare them")
    source = ConfigSource(file, data)
    numbers = _numbers(train, source, findings)
    tables = [holder[TABLE] for holder in (data, data["config"]) if TABLE in holder]
    options = AdapterOptions.of_config(ConfigSource(file, {TABLE: tables[0]} if tables else {}), findings)
    common = {"batch_size": numbers.get("batch_size", 1), "trigger_word": str(process.get("trigger_word") or "")}
    datasets = [keys for i, one in enumerate(_list(process["datasets"]))
                for keys in _datasets(one, i + 1, common, arch, source, findings)]  # fmt: skip
    return JobConfig(
        file, tuple(datasets), arch, _raw_controls(arch, model), step, max(1, numbers.get("gradient_accumulation", 1)),
        JobLength(numbers["steps"]) if "steps" in numbers else None, options, findings,
    )  # fmt: skip


def _named(config: Any) -> Any:
    """A config with `[name]` replaced by its name, as ai-toolkit does it."""
    name = str(config.get("name", ""))

    def replaced(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: replaced(one) for key, one in value.items()}
        if isinstance(value, list):
            return [replaced(one) for one in value]
        return value.replace("[name]", name) if isinstance(value, str) else value

    return replaced(config)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _numbers(train: Mapping[str, Any], source: ConfigSource, findings: Findings) -> dict[str, int]:
    """What decides batches and steps of all datasets; a dataset may have a batch size of its own."""
    types = dict.fromkeys(("batch_size", "gradient_accumulation", "steps"), WHOLE)
    stated = {key: train[key] for key in types if key in train}
    numbers = read_table(stated, types, ("config",), "train", source, findings, lambda key: ("unknown-key", key, ""))
    for key in ("gradient_accumulation", "steps"):  # the batch size is checked with each dataset's
        check_range(key, numbers.get(key), ONE_OR_MORE, "train", findings)
    return numbers


_LEGACY = {"is_v2": "sd2", "is_v3": "sd3", "is_xl": "sdxl", "is_pixart": "pixart", "is_pixart_sigma": "pixart_sigma",
           "is_auraflow": "auraflow", "is_flux": "flux", "is_lumina2": "lumina2", "is_vega": "vega",
           "is_ssd": "ssd"}  # fmt: skip


def _arch(model: Mapping[str, Any]) -> str:
    """The architecture that a job names, in one of ai-toolkit's ways; `qwen_image:2512` is `qwen_image`."""
    named = model.get("arch")
    if isinstance(named, str):
        return named.split(":")[0]
    return next((arch for key, arch in _LEGACY.items() if model.get(key)), "sd1")


def _raw_controls(arch: str, model: Mapping[str, Any]) -> bool:
    more = model.get("model_kwargs")
    return arch in RAW and (arch != "krea2" or (isinstance(more, Mapping) and bool(more.get("edit"))))


def _datasets(
    table: Any, number: int, common: Mapping[str, Any], arch: str, source: ConfigSource, findings: Findings
) -> Iterator[JobKeys]:
    name = f"dataset {number}"
    if not isinstance(table, Mapping):
        findings.error("not-a-table", name, f"it is {table!r}, not keys with values")
        return
    for i, key in enumerate(key for key in table if key not in KEYS and key not in OTHER_KEYS):
        near = near_key(str(key), {*KEYS, *OTHER_KEYS}) if i < MOST_STRANGE else None
        message = f"ai-toolkit ignores {key!r} without a word: it has no such key"
        findings.warning("unknown-key", name, message, f"did you mean {near!r}?" if near else "remove it", (str(key),))
    resolutions = _list(table.get("resolution", 512)) or [[]]  # an empty list is one wrong resolution, and named so
    usable = {key: table[key] for key in KEYS if table.get(key) is not None and key != "resolution"}
    values = read_table(usable, KEYS, ("config",), name, source, findings, lambda key: ("unknown-key", key, ""))
    paths = [values.pop(key, None) for key in ("dataset_path", "folder_path")]
    path = next(filter(None, paths), None)
    if path is None:
        findings.error("no-source", name, "it names no images", "set folder_path")
        return
    # PyTorch is given `prefetch_factor` only where there are workers.
    given = {key: table[key] for key in ("num_workers", "prefetch_factor") if key in table}
    workers = given.setdefault("num_workers", 2)
    if number == 1 and (wrong := loader_mistake(given if workers else {"num_workers": workers}, {})):
        findings.error("loader", name, *wrong)  # the first dataset's count for all
    values = {**common, **values}
    values["caption_ext"] = caption_ending(values.get("caption_ext"), table.get("caption_type"))
    companions = companions_in(table, name, findings)
    if not values.get("is_reg"):
        check_editing(table, companions, arch, name, findings)
    for resolution in resolutions:
        if not WHOLE.fits(resolution) or isinstance(resolution, bool) or resolution < 1:
            findings.error("wrong-type", name, f"resolution is {resolution!r}, but must be whole numbers of 1 or more")
            continue
        keys = JobKeys(number, path, **{**values, "resolution": resolution, "companions": companions})
        if _check(keys, findings):
            yield keys


def caption_ending(caption_ext: Any, caption_type: Any) -> str:
    """The ending of caption files: the older key counts, and takes no dot before it."""
    ending = str(caption_ext or ".txt")
    return str(caption_type or (ending if ending.startswith(".") else f".{ending}"))


_LARGEST_SCALE = 1_000


def _check(keys: JobKeys, findings: Findings) -> bool:
    """Whether buckets follow from the keys of a dataset; what is wrong with them is added."""
    before = len(findings)
    check_range("batch_size", keys.batch_size, ONE_OR_MORE, keys.place, findings)
    check_repeats(keys.num_repeats, keys.place, findings)
    if not 0 < keys.scale <= _LARGEST_SCALE:
        message = f"scale is {keys.scale}, but must be above 0, and no more than {_LARGEST_SCALE:,}"
        findings.error("scale", keys.place, message)
    if keys.num_frames > LARGEST:
        message = f"num_frames is {keys.num_frames:,}, but must be no more than {LARGEST:,}"
        findings.error("frames", keys.place, message)
    if not keys.buckets:
        message = "buckets is false: ai-toolkit then crops every image anew, and draws batches from all of them alike"
        findings.warning("no-buckets", keys.place, message, "leave it out, if images have several sizes")
    if keys.auto_frame_count:
        message = "auto_frame_count lets each clip keep its own length, which depends on the model's code"
        findings.warning("auto-frames", keys.place, f"{message}: its buckets are not shown", "set num_frames")
    plannable = len(findings) == before
    if keys.random_crop and (keys.cache_latents or keys.cache_latents_to_disk):
        message = "random_crop draws a crop at every start, and each is cached again, so the cache grows with every run"
        findings.warning("random-crop", keys.place, message, "leave out random_crop, or the caches")
    return plannable


CLIPS = (".mp4", ".avi", ".mov", ".webm", ".mkv", ".wmv", ".m4v", ".flv")


def listed(keys: JobKeys) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    """The images and, where they are trained, clips of a dataset, in an order that no file system decides.

    And {image: its caption file}, and {image: caption} of those with one in the JSON file.

    Raises:
        OSError, ValueError, TypeError: the source is neither a folder nor a JSON file whose keys are paths.
    """
    entries: Any = {}
    if os.path.isdir(keys.source):
        files = sorted(files_below(keys.source, IMAGES + CLIPS if keys.of_clips else IMAGES))
    else:
        entries = parse_json(read_text(Path(keys.source)))
        files = list(entries)
    files = [path for path in files if os.path.basename(os.path.dirname(path)) != "_controls"]
    stated = {path: entries[path]["caption"] for path in files if path in entries and "caption" in entries[path]}
    beside = {path: os.path.splitext(path)[0] + keys.caption_ext for path in files if path not in stated}
    return files, beside, stated


def files_below(folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Files in a folder and its subfolders, without what is hidden."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (
            os.path.join(root, name) for name in names if name.lower().endswith(endings) and not name.startswith(".")
        )
