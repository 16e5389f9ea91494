"""`kohya-bucket precompute`: encode a data set once, on every GPU there is."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kohya_bucket.buckets import BucketRule, FixedBuckets, KohyaBuckets, load_from_json, load_from_toml, load_preset
from kohya_bucket.cli.console import plain_console
from kohya_bucket.cli.encoders import load_vae
from kohya_bucket.cli.for_sd_scripts import FOR_HELP, version_for
from kohya_bucket.cli.gpus import gpu_counts
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.images import list_images, read_sizes
from kohya_bucket.latents.architectures import ARCHITECTURES
from kohya_bucket.latents.dtypes import dtype_name
from kohya_bucket.latents.layout import Layout
from kohya_bucket.latents.npz_names import paths_of_run
from kohya_bucket.latents.wanted import Recipe, Wanted

if TYPE_CHECKING:
    from kohya_bucket.latents.report import PrecomputeReport

_ARCH_OF_PRESET = {"sdxl": "sdxl", "sd15": "sd", "novelai": "sd"}


def register(app: typer.Typer) -> None:
    @app.command()
    def precompute(
        path: Annotated[list[str] | None, typer.Argument(help="Folders, files, patterns, .txt lists.")] = None,
        vae: Annotated[str, typer.Option("--vae", help="Hub name, folder, or .safetensors file.")] = "",
        output: Annotated[
            Path | None, typer.Option("--output", "-o", help="Folder of the store; npz go beside the images without.")
        ] = None,
        config: Annotated[Path | None, typer.Option(help="An sd-scripts dataset config instead of PATH.")] = None,
        gpus: Annotated[
            str, typer.Option(help="With --config: numbers of GPUs that will train, e.g. 1,2; else those used here.")
        ] = "",
        train_batch_size: Annotated[
            int | None, typer.Option("--train-batch-size", min=1, help="With --config, where it is silent.")
        ] = None,
        preset: Annotated[str | None, typer.Option("--preset", "-p", help="A bundled bucket set, e.g. sdxl.")] = None,
        bucket_config: Annotated[
            Path | None, typer.Option("--bucket-config", "-c", help="A bucket set in a TOML or JSON file.")
        ] = None,
        resolution: Annotated[int | None, typer.Option(help="Kohya's buckets at this resolution.")] = None,
        batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images per run of the VAE.")] = 8,
        dtype: Annotated[str, typer.Option(help="Stored and computed as float32, float16 or bfloat16.")] = "bfloat16",
        flip: Annotated[bool, typer.Option("--flip", help="Store the mirrored images too.")] = False,
        mask: Annotated[bool, typer.Option("--mask", help="Store the alpha channel too.")] = False,
        posterior: Annotated[bool, typer.Option("--posterior", help="Store mean and deviation, no sample.")] = False,
        format: Annotated[str, typer.Option(help="shards, or npz: sd-scripts' own files.")] = "shards",
        arch: Annotated[str, typer.Option(help=f"Model family: {', '.join(ARCHITECTURES)}.")] = "",
        for_: Annotated[str, typer.Option("--for", help=FOR_HELP)] = "",
        interpolation: Annotated[str, typer.Option(help="Filter of the resize; auto is sd-scripts'.")] = "auto",
        collection: Annotated[str, typer.Option(help="Part of the store, to keep several models apart.")] = "",
        captions_file: Annotated[
            Path | None, typer.Option("--captions-file", help="One caption per line; else .txt files are read.")
        ] = None,
        device: Annotated[str | None, typer.Option(help="E.g. cuda:0; by default this process' GPU.")] = None,
        tiling: Annotated[bool, typer.Option("--tiling", help="Encode in tiles: less memory.")] = False,
        slicing: Annotated[bool, typer.Option("--slicing", help="Encode image by image: less memory.")] = False,
        xformers: Annotated[bool, typer.Option("--xformers", help="xformers' attention.")] = False,
        compile: Annotated[bool, typer.Option("--compile", help="Let torch.compile translate the VAE.")] = False,
        hash: Annotated[bool, typer.Option("--hash", help="Store a hash of each image's content.")] = False,
        workers: Annotated[int | None, typer.Option(min=1, help="Threads that decode images.")] = None,
        recursive: Annotated[bool, typer.Option(help="Look into subfolders.")] = True,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but problems.")] = False,
    ) -> None:
        """Encode images with a VAE once; run it again at any time, and it does only what is missing or stale.

        On several GPUs: torchrun --nproc-per-node 8 -m kohya_bucket.precompute …, or accelerate launch -m.
        """
        if not vae:
            raise ConfigError("nothing to encode with: add --vae, e.g. --vae stabilityai/sdxl-vae")
        if for_ and format != "npz":
            raise ConfigError("--for says which sd-scripts will read npz: add --format npz, or leave it out")
        reader = version_for(for_) if format == "npz" else ""
        arch = arch or _ARCH_OF_PRESET.get(preset or "", "")
        encoder = load_vae(vae, device=device, dtype=dtype, architecture=arch, tiling=tiling, slicing=slicing,
                           xformers=xformers, compile=compile)  # fmt: skip
        from kohya_bucket.latents.encoder import encoder_hash
        from kohya_bucket.latents.precompute import encode_wanted
        from kohya_bucket.latents.report import joined

        recipe = Recipe(
            encoder_hash(encoder), dtype_name(dtype), "posterior" if posterior else "latents", flip, mask,
            interpolation, collection,
        )  # fmt: skip
        if config is not None:
            if path or preset or bucket_config or resolution:
                raise ConfigError("--config says which images and buckets there are: leave out PATH and bucket options")
            todo = _by_config(config, recipe, output, hash, quiet, gpus, train_batch_size)
        elif gpus or train_batch_size:
            raise ConfigError("--gpus and --train-batch-size say how a --config will be trained: leave them out")
        else:
            rule = _rule(preset, bucket_config, resolution)
            todo = [_by_path(path or [], rule, recipe, output, hash, recursive, captions_file, quiet)]
        further: list[PrecomputeReport] = []
        problems = 0
        console = plain_console(stderr=True)
        family = ARCHITECTURES.get(arch or str(getattr(encoder, "architecture", "")))
        paths: list[list[Path]] | list[None] = [None] * len(todo)
        if format == "npz" and family is not None and todo:  # without one, `encode_wanted` says what is missing
            paths = paths_of_run([part.wanted for part in todo], family.read_by(reader), output, todo[0].root)
        for part, npz_paths in zip(todo, paths, strict=True):
            with _shown(console, quiet) as show:
                report = encode_wanted(
                    part.wanted, encoder, output, part.root, batch_size=batch_size, format=format,
                    architecture=arch, workers=workers, progress_callback=show, npz_paths=npz_paths, sd_scripts=reader,
                    say=lambda text: console.print(text, soft_wrap=True, markup=False),
                )  # fmt: skip
            problems += len(report.failed)
            if part.wanted.further:
                further.append(report)
            elif not quiet:
                _print(report)
        if further and not quiet:
            typer.echo("at further sizes:")
            _print(joined(further))
        if problems:
            raise KohyaBucketError(f"{problems} images could not be encoded, see above; the others are done")


@dataclass
class _Part:
    wanted: Wanted
    root: Path


def _rule(preset: str | None, bucket_config: Path | None, resolution: int | None) -> BucketRule:
    if sum(option is not None for option in (preset, bucket_config, resolution)) != 1:
        raise ConfigError("choose the buckets by exactly one of --preset, --bucket-config, --resolution or --config")
    if preset is not None:
        return FixedBuckets(load_preset(preset))
    if bucket_config is not None:
        load = load_from_json if bucket_config.suffix.lower() == ".json" else load_from_toml
        return FixedBuckets(load(bucket_config))
    side = resolution or 0
    return KohyaBuckets(side, 256, max(1024, 2 * side))


def _by_path(
    sources: list[str], rule: BucketRule, recipe: Recipe, output: Path | None, hash: bool, recursive: bool,
    captions_file: Path | None, quiet: bool,
) -> _Part:  # fmt: skip
    if not sources:
        raise ConfigError("nothing to encode: name a folder, e.g. kohya-bucket precompute data/ --vae …")
    paths = list_images(sources, recursive=recursive)
    if not paths:
        raise KohyaBucketError(f"{', '.join(sources)}: no images found there")
    captions = _captions(paths, captions_file)
    with scan_progress("reading headers", quiet=quiet) as progress:
        scan = read_sizes(paths, progress=progress)
    root = _root(paths, sources, output)
    wanted = Wanted.from_placement(
        paths, scan.sizes, rule.place(scan.sizes), recipe, root, captions=captions, content_hash=hash
    )
    reasons = {path: reason for _, path, reason in scan.failures}
    wanted.without_bucket = [(path, reasons.get(path, reason)) for path, reason in wanted.without_bucket]
    return _Part(wanted, root)


def _by_config(
    config: Path, recipe: Recipe, output: Path | None, hash: bool, quiet: bool, gpus: str, train_batch_size: int | None
) -> list[_Part]:
    from kohya_bucket.adapter.options import AdapterOptions, environment_table
    from kohya_bucket.sdscripts.config import read_config
    from kohya_bucket.sdscripts.plan.latents import wanted_by_config

    read = read_config(config, {} if train_batch_size is None else {"train_batch_size": train_batch_size})
    errors = [f for f in read.findings if f.severity.name == "ERROR"]
    if errors:
        raise ConfigError(f"{config}: {errors[0]}; `kohya-bucket plan {config}` lists everything")
    settings = AdapterOptions.from_tables(
        *environment_table(), *([] if read.table is None else [(str(config), read.table)])
    )
    # Every process must come to the same list, whatever devices it sees.
    counts = gpu_counts(gpus or os.environ.get("WORLD_SIZE", "1"))
    if settings.remainder in ("merge", "catch_all") and not quiet:
        batches = " and ".join(str(n) for n in sorted({dataset.config.batch_size for dataset in read.datasets}))
        numbers = ", ".join(map(str, counts))
        where = f"on {numbers} GPU{'s' * (counts != [1])} " if settings.same_shape else ""
        more = "" if gpus or not settings.same_shape else "; for another number add --gpus"
        typer.echo(f"remainder {settings.remainder!r} moves images: for training {where}in batches of {batches}{more}")
    paths = [path for dataset in read.datasets for path in dataset.images.paths]
    root = _root(paths, [], output)
    with scan_progress("reading headers", quiet=quiet) as progress:
        parts = wanted_by_config(
            read, recipe, root, settings=settings, gpus=counts, content_hash=hash, progress=progress
        )
    return [_Part(wanted, root) for wanted in parts]


def _captions(paths: list[str], file: Path | None) -> list[str | None]:
    if file is not None:
        lines: list[str | None] = [*_utf8(file).splitlines()]
        if len(lines) != len(paths):
            raise ConfigError(f"{file} has {len(lines)} lines for {len(paths)} images: give one per image, in order")
        return lines
    out: list[str | None] = []
    for path in paths:
        beside = Path(path).with_suffix(".txt")
        out.append(_utf8(beside).strip() if beside.is_file() else None)
    return out


def _utf8(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: the caption cannot be read ({error}); it must be UTF-8 text") from None


def _root(paths: list[str], sources: list[str], output: Path | None) -> Path:
    """Folder that the sources' names start from: the store's own, the one folder given, or the common one."""
    from kohya_bucket.latents.precompute import common_root

    if len(sources) == 1 and Path(sources[0]).is_dir() and (output is None or not Layout(output).settings.is_file()):
        return Path(sources[0]).absolute()  # with its links, as the images' paths have them
    return common_root(paths, output)


class _shown:
    """Progress with rate and remaining time, on a terminal; a line now and then elsewhere."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._bar: Progress | None = None
        self._last = self._start = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> Any:
        if self._quiet:
            return None
        if self._console.is_terminal:
            columns = (TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
                       TimeRemainingColumn())  # fmt: skip
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None, rate="")
            self._bar.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, done: int, total: int) -> None:
        now = time.monotonic()
        rate = done / max(1e-9, now - self._start)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, rate=f"{rate:.1f}/s")
        elif now - self._last > 10 or (done == total and total):
            self._last = now
            left = f", {(total - done) / rate:.0f} s left" if done and done < total else ""
            self._console.print(f"encoded {done} of {total}, {rate:.1f}/s{left}", highlight=False)


def _print(report: PrecomputeReport) -> None:
    where = "beside the images" if report.output is None else str(report.output)
    for reason, n in report.reasons.items():
        typer.echo(f"{n} to do: {reason}")
    elsewhere = f", {report.elsewhere} by other processes" if report.elsewhere else ""
    typer.echo(
        f"{report.encoded} encoded{elsewhere}, {report.current} were current, {len(report.failed)} failed; "
        f"{report.total} images in {len(report.buckets)} buckets, {where}"
    )
    if report.encoded:
        seconds = max(report.seconds, 1e-9)
        idle = 100 * report.device_idle / seconds
        typer.echo(f"{seconds:.1f} s, {report.encoded / seconds:.1f}/s, VAE idle {idle:.0f} % of it")
    for path, reason in report.without_bucket[:10]:
        typer.echo(f"no bucket: {path}: {reason}")
    if len(report.without_bucket) > 10:
        typer.echo(f"no bucket: {len(report.without_bucket) - 10} more")
