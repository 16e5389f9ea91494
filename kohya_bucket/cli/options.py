"""Options of several commands, spelled and explained once, and what must not be given together."""

from __future__ import annotations

import functools
import inspect
import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, get_type_hints

import typer

from kohya_bucket.buckets.choices import RuleOptions
from kohya_bucket.buckets.families import FAMILIES, family_named, is_family
from kohya_bucket.buckets.rules.registry import named_rule, rule_choices
from kohya_bucket.checks import number_of_launch, one_of, path_meant
from kohya_bucket.cli.help import ADVANCED, opt, rare
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.files import MADE_BY
from kohya_bucket.images import IMAGE_EXTENSIONS
from kohya_bucket.images.listing import file_key
from kohya_bucket.inputs import open_input

if TYPE_CHECKING:
    from PIL.Image import Image

    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.buckets.rules.kohya import SettingNames
    from kohya_bucket.buckets.sizes import IntArray
    from kohya_bucket.images.parallel import Engine
    from kohya_bucket.latents.items import EncodeOptions
    from kohya_bucket.trainers.door.dataset_keys import DatasetKeys


_Command = Callable[..., None]


def with_option_groups(command: _Command, without: Collection[str] = ()) -> _Command:
    """Let typer see, in place of each parameter of a command that is a dataclass, the dataclass' fields as options.

    Parameters and fields that `opt` made are options; fields without a help text are not. The dataclass' `panel` is
    the title over its options.

    Args:
        without: fields that mean nothing to the command; they keep their defaults.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for p in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(p.annotation) and isinstance(p.annotation, type):
            options = _options_of(p.annotation, without)
            groups[p.name] = p.annotation, [option.name for option in options]
            parameters += options
        elif isinstance(p.default, Field):
            parameters.append(_option(p.name, p.annotation, p.default))
        else:
            parameters.append(p.replace(kind=p.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        made = {name: kind(**{field: values.pop(field) for field in names}) for name, (kind, names) in groups.items()}
        command(**made, **values)

    # what typer reads
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _options_of(group: type, without: Collection[str]) -> list[inspect.Parameter]:
    hints, panel = get_type_hints(group), getattr(group, "panel", None)
    kept = [f for f in fields(group) if "help" in f.metadata and f.name not in without]
    kept.sort(key=lambda f: f.name not in inspect.get_annotations(group))  # those that it inherits come last
    return [_option(f.name, hints[f.name], f, panel) for f in kept]


def _option(name: str, hint: Any, field: Field[Any], panel: str | None = None) -> inspect.Parameter:
    said, text = field.metadata, field.metadata["help"] or SHARED.get(name, "")
    option = (typer.Option if said.get("usual") else rare)(
        *said.get("spelled", ()), help=text() if callable(text) else text, **said.get("about", {})
    )
    option.rich_help_panel = option.rich_help_panel or panel
    annotation: Any = Annotated[hint, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation)


def given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of a command's parameters that were given, as options: `bucket_reso_steps` is "--bucket-reso-steps"."""
    sources = ((name, context.get_parameter_source(name)) for name in names)
    return [_spelled(name) for name, source in sources if source and source.name == "COMMANDLINE"]


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def refuse_beside(context: typer.Context, what: str, names: Iterable[str], path: Sequence[str] = ()) -> None:
    """Refuse parameters that would be passed over in silence, if one was given, and a `path`: `ConfigError`.

    `what` says why they do not count, as the beginning of a sentence, e.g. "--config c.toml brings its own rules".
    """
    if out := " ".join(path) or " and ".join(given(context, names)):
        raise ConfigError(f"{what}: leave out {out}")


Sources = Annotated[list[str], typer.Argument(help="Folders, files, patterns, lists, tar shards.")]
TableOrSources = Annotated[list[str], typer.Argument(help="Folders, files, lists, tar shards, or one table of sizes.")]
Recursive = Annotated[bool, rare(help="Look into subfolders.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, rare("--quiet", "-q", help="Show no progress.")]


def path(text: str) -> Path:
    """A folder, or an address in object storage, which is used like one; the function's name is what help shows."""
    from kohya_bucket.latents.store.storage import as_given

    return cast("Path", as_given(text))


_PER_STEP = "Images per step of each GPU."
_AS_THERE = "As in sd-scripts."
_CONFIG = "A config of a trainer: its images and rules are taken."
SHARED: Mapping[str, str] = {
    "arch": f"The model: {', '.join(FAMILIES)}; or a program, flux_train.py; for clips and musubi-tuner wan, "
    "qwen-image, z-image, …",
    "batch_size": _PER_STEP,
    "bucket_no_upscale": _AS_THERE,
    "bucket_reso_steps": _AS_THERE,
    "caption_extension": "Ending of caption files.",
    "collection": "Part of a store, to keep several models apart.",
    "config": _CONFIG,
    "config_option": _CONFIG,
    "dtype": "Type of the latents: float32, float16 or bfloat16.",
    "engine": "local, or ray: a Ray cluster.",
    "for_": "npz for this sd-scripts: 0.10.1, 0.11, or its folder; by default the folder one is in, or the newest.",
    "gpus": "Numbers of GPUs that train together: 1,2,4.",
    "hash": "Hash every file's content, to notice copies and changes.",
    "images": "Where the images are, if they were moved.",
    "max_bucket_reso": _AS_THERE,
    "min_bucket_reso": _AS_THERE,
    "resolution": "512 or 832,1216.",
    "sd_scripts": "Its checkout or version; else the checkout that you are in.",
    "train_batch_size": _PER_STEP,
    "vae": "Hub name, folder, or .safetensors file.",
    "workers": "At most this many threads or processes.",
}
"""Help of options that several commands have, by the parameter's name: an option means the same wherever it is."""

_ENGINES: dict[str, Engine] = {"local": "auto", "ray": "ray"}


def engine_of(name: str) -> Engine:
    """The scan's engine. `ConfigError` for another name."""
    return _ENGINES[one_of("--engine", name, _ENGINES, ConfigError)]


_MOST_GPUS = 65_536


def numbers_of(option: str, text: str, most: int, example: str) -> list[int]:
    """Whole numbers from `1,2,4`, the values of an option. `ConfigError` for anything else."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > most:
        raise ConfigError(f"{option} is {text!r}, but must be whole numbers from 1 to {most:,}, e.g. {example}")
    return numbers


def gpu_counts(text: str) -> list[int]:
    return numbers_of("--gpus", text, _MOST_GPUS, "1,2,4")


def _is_made_here(file: Path) -> bool:
    with open_input(file) as start:
        return MADE_BY.encode() in start.read(4096)


def saved_as(picture: Image, kind: str) -> bytes:
    """A picture as a file that `check_output` knows again, in kinds that hold a text."""
    from PIL.PngImagePlugin import PngInfo

    about, out = PngInfo(), io.BytesIO()
    about.add_text("Software", MADE_BY)
    picture.save(out, kind, optimize=True, pnginfo=about, comment=MADE_BY.encode())
    return out.getvalue()


def check_output(
    option: str, output: Path | None, what: str, inputs: Iterable[str | Path | None],
    ours: Callable[[Path], bool] = _is_made_here,
) -> None:  # fmt: skip
    """Before anything is read: an output that is far, a folder, in none, an image, or an input of the command.

    All of them are refused, also a folder that does not exist, which may be a slip, and what is not `ours`.

    Args:
        what: what is written, e.g. "a Parquet file"; a name ending in "picture" may have an image's ending.
        inputs: files and folders that the command reads.
        ours: whether a file is of this package's making, and may be written over.
    """
    if output is None:
        return
    first = output.parts[0] if output.parts else ""
    if first.endswith(":") and len(first) > 2 and not Path(first).exists():  # what a `Path` makes of an address
        address = f"{first}//{'/'.join(output.parts[1:])}"
        raise KohyaBucketError(f"{option} is {address}, but is written to this machine only: give a local path")
    if output.is_dir():
        raise KohyaBucketError(f"{option} is {output}, a folder: name a file in it")
    if not output.parent.is_dir():
        make = f"make it, or {path_meant(output.parent)}"
        raise KohyaBucketError(f"{option} is {output}, but there is no folder {output.parent}: {make}")
    if output.suffix.lower() in IMAGE_EXTENSIONS and not what.endswith("picture"):
        raise KohyaBucketError(f"{option} is {output}, named as an image, but {what} is written: give another name")
    for source in inputs:
        if source is not None and Path(source).is_file() and output.exists() and output.samefile(source):
            raise KohyaBucketError(
                f"{option} is {output}, which is also an input and would be overwritten: give another name"
            )
    if output.is_file() and output.stat().st_size and not ours(output):
        raise KohyaBucketError(
            f"{option} is {output}, which is not known to be {what} of this package's making, and would be "
            "overwritten: give another name, or delete it first"
        )


def refuse_one_file(outputs: Mapping[str, Path | None]) -> None:
    """Refuse two outputs of a command, by option, in one file: the later would take the place of the other."""
    named: dict[str, str] = {}
    for option, path in outputs.items():
        if path is not None and (first := named.setdefault(file_key(path), option)) != option:
            raise ConfigError(f"{first} and {option} both name {path}: give each a file of its own")


@dataclass(frozen=True, kw_only=True)
class RuleArguments(RuleOptions):
    """What a command line says about the rule; each field is an option, also those of rules that have a help text.

    The defaults are sd-scripts' (`sdscripts.config.keys.DEFAULTS`). Its trainers have none for `resolution` and
    want it given; 512 is that of its own program that sorts images into buckets, `prepare_buckets_latents.py`.
    """

    panel: ClassVar[str] = "Buckets"

    rule: str | None = opt(None, lambda: f"{', '.join(rule_choices())}.")
    preset: str | None = opt(None, "A bundled bucket set, e.g. sdxl.", "--preset", "-p")
    bucket_config: Path | None = opt(None, "A bucket set in a TOML or JSON file.", "--bucket-config", "-c")
    resolution: str = opt("512")
    min_bucket_reso: int = opt(256)
    max_bucket_reso: int = opt(1024, min=1)
    bucket_reso_steps: int = opt(64)
    bucket_no_upscale: bool = opt(False, "", "--bucket-no-upscale", "--no-upscale")

    @property
    def name(self) -> str:
        """The one rule that is named, as `rule_from_name` takes it."""
        kinds = {"rule": "", "preset": "preset:", "bucket_config": "file:"}
        values = {name: getattr(self, name) for name in kinds}
        named = {_spelled(name): f"{kinds[name]}{value}" for name, value in values.items() if value is not None}
        if len(named) > 1:
            raise ConfigError(f"{' and '.join(named)} both name a bucket set: give one of them")
        return next(iter(named.values()), "kohya")

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
    def size(self) -> tuple[int, int]:
        """The resolution as (width, height). `ConfigError` for anything else."""
        from kohya_bucket.trainers.door.config_source import parse_resolution

        return parse_resolution(self.resolution)

    def for_arch(self, context: typer.Context, arch: str | None) -> RuleArguments:
        """With what people set for a family that `--arch` names, except for what is given beside it."""
        if not arch or self.brings_sizes:
            return self
        usual = family_named(family_of(arch))
        names = "resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps"
        values = str(usual.resolution), usual.min_size, usual.max_size, usual.reso_steps
        changed: dict[str, Any] = dict(zip(names, values, strict=True))
        return replace(self, **{name: value for name, value in changed.items() if not given(context, [name])})

    @property
    def title(self) -> str:
        """For a reader."""
        width, height = self.size
        return f"{width}x{height}, {'no upscaling' if self.bucket_no_upscale else self.name}"

    @property
    def keys(self) -> DatasetKeys:
        """The same as the keys of a dataset; `BucketSettingsError` for what sd-scripts would stop at."""
        from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, rule_for

        limits = self.min_bucket_reso, self.max_bucket_reso, self.bucket_reso_steps
        keys = DatasetKeys(self.size, True, *limits, self.bucket_no_upscale)
        rule_for(keys, names=_setting_names())
        return keys

    def check(self) -> None:
        """Refuse at once, before images are read, what `make` refuses whatever they are."""
        if named_rule(self.name).from_images:
            _ = self.keys
        else:
            self.make()

    def make(self, sizes: IntArray | None = None) -> BucketRule:
        """The rule. `sizes` [N, 2] are for those that are made from the data."""
        from kohya_bucket.buckets import rule_from_name
        from kohya_bucket.trainers.door.dataset_keys import rule_for
        from kohya_bucket.trainers.door.options import AdapterOptions

        rule_options = self.of_rules()
        if self.brings_sizes:
            return rule_from_name(self.name, max_reso=self.size, no_upscale=self.bucket_no_upscale, **rule_options)
        return rule_for(self.keys, AdapterOptions(rule=self.name, **rule_options), sizes, _setting_names())


def _setting_names() -> SettingNames:
    from kohya_bucket.buckets.rules.kohya import SettingNames

    return SettingNames("--min-bucket-reso", "--max-bucket-reso", "--bucket-reso-steps", "--bucket-no-upscale")


@dataclass(frozen=True)
class SourceOptions:
    """Where images and captions are in what is named; each field is an option."""

    panel: ClassVar[str] = ADVANCED

    captions_file: Path | None = opt(None, "A file with one caption per line. Default: what is beside each image.")
    caption_extension: str = opt(".txt")
    image_column: str = opt("image", "Of Parquet files and saved datasets: the column of images.")
    caption_column: str | None = opt(None, "Of the same: the column of captions. Default: none.")


BATCH_SIZE = "--train-batch-size", "--batch-size", "-b"


@dataclass(frozen=True)
class TrainerArguments:
    """What sd-scripts' trainer is started with, if the config does not set it; each field is an option."""

    panel: ClassVar[str] = "If the config does not set it"

    resolution: str | None = opt(None)
    train_batch_size: int | None = opt(None, "", *BATCH_SIZE, min=1)
    enable_bucket: bool = opt(False, "", "--enable-bucket")
    bucket_no_upscale: bool = opt(False, "", "--bucket-no-upscale", "--no-upscale")
    min_bucket_reso: int | None = opt(None)
    max_bucket_reso: int | None = opt(None, min=1)
    bucket_reso_steps: int | None = opt(None)
    caption_extension: str | None = opt(None)
    cache_latents: bool = opt(False, "", "--cache-latents")
    cache_text_encoder_outputs: bool = opt(False, "", "--cache-text-encoder-outputs")

    def given(self) -> dict[str, Any]:
        """Their names and values, as `read_config` takes them; a flag that is off counts as not given."""
        return {name: None if value is False else value for name, value in asdict(self).items()}


CLIP_SIZE = re.compile(r"(\d+)\s*[xX×*,]\s*(\d+)\s*[xX×*,@]\s*(\d+)")


def family_of(arch: str) -> str:
    """The family that `--arch` names, itself or by a program's file; anything else comes back as it is."""
    if is_family(arch):
        return arch
    from kohya_bucket.trainers.door.face import Asked
    from kohya_bucket.trainers.door.registry import usual_trainer

    try:
        return usual_trainer().programs(Asked(arch=arch)).family
    except ConfigError:
        return arch


@dataclass(frozen=True)
class ClipOptions:
    """The model, and how musubi-tuner takes frames; each field is an option."""

    arch: str | None = opt(None)
    target_frames: str | None = opt(None, "Of a clip: 1,25,45; else all up to 129.", usual=False)
    source_fps: float | None = opt(None, "Of a clip: as in musubi-tuner, with --arch.", usual=False)

    def family(self) -> tuple[str | None, ClipOptions]:
        """The family of sd-scripts that `arch` names, which trains no clips, and the options without it."""
        if self.arch is None:
            return None, self
        if is_family(family_of(self.arch)):
            return self.arch, replace(self, arch=None)
        from kohya_bucket.trainers.door.registry import trainer_of_model

        trainer_of_model(self.arch)  # an unknown one is said
        return None, self

    def lengths(self) -> tuple[int, ...] | None:
        """The lengths that are taken; None for all frames. `ConfigError` for some below 1."""
        from kohya_bucket.buckets.clips import MOST_FRAMES

        if self.target_frames is None:
            return None
        return tuple(numbers_of("--target-frames", self.target_frames, MOST_FRAMES, "1,25,45"))

    def keys(self) -> dict[str, Any]:
        """The same as keys of a dataset; None for those that are not given."""
        lengths = self.lengths()
        extraction = None if lengths is None else "head"
        return {"target_frames": lengths, "frame_extraction": extraction, "source_fps": self.source_fps}


@dataclass(frozen=True)
class ClusterOptions:
    """Which engine, and how many encoders it has; each field is an option."""

    panel: ClassVar[str] = ADVANCED

    engine: str = opt("local")
    concurrency: int | None = opt(None, "With ray: encoders; by default one for each GPU.", min=1)

    def on_ray(self) -> bool:
        if engine_of(self.engine) != "ray":
            if self.concurrency is not None:
                raise ConfigError("--concurrency says how many encoders Ray starts: add --engine ray, or leave it out")
            return False
        if number_of_launch("WORLD_SIZE", 1, range(1, 1 << 31)) != 1:
            raise ConfigError("--engine ray starts its processes itself: start the command once, without torchrun")
        return True


@dataclass(frozen=True)
class VaeOptions:
    """Which VAE, and how it runs; each field is an option."""

    vae: str = opt("")
    arch: str = opt("")
    dtype: str = opt("auto", usual=False)
    device: str | None = opt(None, "E.g. cuda:0; by default this process' GPU.", usual=False)

    def load_options(self) -> dict[str, Any]:
        """The same as `load_vae` takes them."""
        options = asdict(self)
        return options | {"architecture": options.pop("arch")}


@dataclass(frozen=True)
class StoreOptions:
    """Which latents are made, and in which files they lie; each field is an option."""

    flip: bool = opt(False, "Store the mirrored images too.", "--flip")
    mask: bool = opt(False, "Store the alpha channel too.", "--mask", usual=False)
    posterior: bool = opt(False, "Store mean and deviation, no sample.", "--posterior", usual=False)
    format: str = opt("shards", "shards, or npz: sd-scripts' own files.")
    for_: str = opt("", "", "--for", usual=False)
    collection: str = opt("", usual=False)

    def recipe(self, dtype: str, output: Path | None) -> EncodeOptions:
        """How latents are made with these options; the hash of the encoder is still missing.

        With `dtype` "auto" they are stored in bfloat16 whatever computes them, so that a store serves on all machines.
        """
        from kohya_bucket.latents.dtypes import dtype_name
        from kohya_bucket.latents.items import EncodeOptions

        kind = "posterior" if self.posterior else "latents"
        one_of("--format", self.format, ("shards", "npz"), ConfigError)
        if self.format == "npz":
            from kohya_bucket.trainers.door.registry import usual_trainer

            usual_trainer().cache_files().check_kind(kind, output)
        elif output is None:
            raise ConfigError("shards need an output folder: add --output")
        stored = "bfloat16" if dtype == "auto" else dtype_name(dtype)
        return EncodeOptions("", stored, kind, self.flip, self.mask, collection=self.collection)


@dataclass(frozen=True)
class TextOptions:
    """Captions in place of images; each field is an option."""

    text: bool = opt(False, "Captions: of the store in --output, or PATH is an sd-scripts trainer.", "--text")
    text_encoder: list[str] | None = opt(
        None, "With --text: CLIP or T5, hub name or folder; may be repeated.", usual=False
    )
    max_length: list[int] | None = opt(
        None, "Tokens of each text encoder, in their order; else its tokenizer's.", min=1, usual=False
    )
    layer: int = opt(-1, "Hidden state of text encoders: -1 the last, -2 as for SDXL.", usual=False)
    apply_mask: bool = opt(False, "Text encoders leave out padding, which is 0 then.", "--apply-mask", usual=False)
