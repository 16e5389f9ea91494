"""The work of `precompute`: what is to be encoded, here or on a cluster, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import typer

from kohya_bucket.checks import number_of_launch
from kohya_bucket.cli.console import say, say_first, scan_progress
from kohya_bucket.cli.options import (
    ClusterOptions,
    RuleArguments,
    TextOptions,
    VaeOptions,
    engine_of,
    gpu_counts,
    refuse_beside,
)
from kohya_bucket.cli.sources import ImageInput
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.extras import pip_install
from kohya_bucket.images.listing import from_here
from kohya_bucket.latents.encode.worker import PrecomputeReport
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.latents.store.layout import Layout, common_root
from kohya_bucket.latents.store.storage import StorePath, is_there
from kohya_bucket.texts import counted, some, uncaptioned
from kohya_bucket.trainers.door.face import Asked
from kohya_bucket.trainers.door.options import store_folder
from kohya_bucket.trainers.door.registry import trainer_for, usual_trainer

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.trainers.door.cache_files import ConfigLatents
    from kohya_bucket.trainers.door.options import AdapterOptions


@dataclass(frozen=True)
class NamedImages:
    """Images that a command line names; the rule is None where it is made from all sizes."""

    names: list[str]
    images: ImageInput
    options: RuleArguments
    rule: BucketRule | None

    def parts(self, work: EncodeJob, encoding: EncodeOptions, engine: str) -> tuple[Path, list[LatentItems]]:
        """The folder that names start from, and all of these images, in their buckets; reads their headers."""
        scanned = self.images.read(engine_of(engine), work.quiet)
        if not len(scanned.images):
            raise ConfigError(f"{', '.join(self.names)}: no images found there")
        bare = [i for i, text in enumerate(scanned.captions or ()) if not (text or "").strip()]
        if bare and not work.quiet:
            names = [from_here(scanned.images.names[i]) for i in bare]
            say(uncaptioned(names, len(scanned.images), "none is stored"), err=True)
        placement = (self.rule or self.options.make(scanned.sizes)).place(scanned.sizes)
        root = _root(scanned.images.files, self.names, work.output)
        wanted = LatentItems.from_placement(
            scanned.images, scanned.sizes, placement, encoding, root, captions=scanned.captions, content_hash=work.hash
        )
        left_out = zip(np.flatnonzero(~placement.placed).tolist(), wanted.without_bucket, strict=True)
        wanted.without_bucket = [(name, scanned.reasons.get(i, reason)) for i, (name, reason) in left_out]
        return root, [wanted]


@dataclass(frozen=True)
class ConfigImages:
    """The latents of a dataset config, its `[kohya_bucket]` table, and the numbers of GPUs that will train it."""

    latents: ConfigLatents
    adapter: AdapterOptions
    gpus: list[int]
    gpus_said: bool

    def store(self) -> StorePath | None:
        """Where training with this config looks for shards; None where it looks for npz."""
        if self.adapter.latent_cache != "shards":
            return None
        firsts = [paths[0] for paths in self.latents.paths if len(paths)]
        folders = sorted({store_folder(self.adapter, path) for path in firsts}, key=str)
        if len(folders) > 1:
            raise ConfigError(
                f"latents of the config's datasets lie in {len(folders)} folders ({some(list(map(str, folders)))}): "
                "set latent_cache_dir in [kohya_bucket], and give it as --output"
            )
        return folders[0] if folders else None

    def parts(self, work: EncodeJob, encoding: EncodeOptions, _: str) -> tuple[Path, list[LatentItems]]:
        """The same of all that sd-scripts would cache for it, one part for each kind of caching; reads headers."""
        if self.adapter.moving and not work.quiet:
            self._say_what_it_is_for()
        root = _root([path for paths in self.latents.paths for path in paths], [], work.output)
        with scan_progress("reading headers", quiet=work.quiet) as progress:
            wanted = self.latents.wanted(encoding, root, gpus=self.gpus, content_hash=work.hash, progress=progress)
        if not any(map(len, wanted)):
            why = [f"{path}: {reason}" for part in wanted for path, reason in part.without_bucket]
            raise ConfigError(f"no image of the config gets a latent, so there is nothing to encode: {some(why, 1)}")
        return root, wanted

    def _say_what_it_is_for(self) -> None:
        batches = " and ".join(map(str, sorted(set(self.latents.batch_sizes))))
        where = more = ""
        if self.adapter.one_shape:
            where = f"on {', '.join(map(str, self.gpus))} GPU{'s' * (self.gpus != [1])} "
            more = "" if self.gpus_said else "; for another number add --gpus"
        say(f"remainder {self.adapter.remainder!r} moves images: for training {where}in batches of {batches}{more}")


def planned(config: Path, train_batch_size: int | None, gpus: str | None, sd_scripts: str) -> ConfigImages:
    """A config in which sd-scripts would stop at nothing, for a version of it or "" for the one at hand.

    `gpus` is None for the number that this run has.
    """
    asked = Asked(config, version=sd_scripts or None, arguments={"train_batch_size": train_batch_size})
    latents = trainer_for("precompute", config).latents(asked)
    # Every process must come to the same list, whatever devices it sees.
    return ConfigImages(
        latents,
        latents.options,
        gpu_counts(gpus or str(number_of_launch("WORLD_SIZE", 1, range(1, 1 << 31)))),
        gpus is not None,
    )


def _root(paths: list[str], sources: list[str], output: Path | None) -> Path:
    """Folder that the sources' names start from: the store's own, the one folder given, or the common one."""
    if len(sources) == 1 and Path(sources[0]).is_dir() and (output is None or not is_there(Layout(output).store_file)):
        return Path(sources[0]).absolute()  # with its links, as the images' paths have them
    return common_root(paths, output)


_say = partial(say, err=True)


def _say_type(computes: str, stored: str, quiet: bool) -> None:
    """The first line: the type that an encoder computes in, and why, where it says so."""
    if computes and not quiet and os.environ.get("RANK", "0") == "0":
        say(f"computes in {computes}{stored}")


@dataclass(frozen=True)
class EncodeJob:
    """What is to be encoded, and how, wherever that happens. Both methods give how many images could not be."""

    source: NamedImages | ConfigImages
    recipe: EncodeOptions
    output: Path | None
    hash: bool
    quiet: bool
    batch_size: int | None
    workers: int | None

    def here(self, vae: VaeOptions, format: str, version: str) -> int:
        from kohya_bucket.latents.encode.precompute import LatentOutput, StoreOutput, encode_items, end_launch, launched
        from kohya_bucket.latents.vae.encoder import encoder_hash

        encoder = load_vae(**vae.load_options())
        stored = "float32" if format == "npz" else self.recipe.dtype
        _say_type(getattr(encoder, "computes", ""), f"; stored in {stored}", self.quiet)
        root, todo = self.source.parts(self, replace(self.recipe, vae=encoder_hash(encoder)), "local")
        output: LatentOutput
        if format == "npz":
            output = npz = usual_trainer().cache_files().writer(vae.arch, self.output, version)
            todo = npz.with_files(todo, encoder, root)
        else:
            output = StoreOutput(cast("Path", self.output))  # without one `StoreOptions` refuses shards
        rank, processes = launched()
        encode = partial(
            encode_items, encoder=encoder, output=output, images_root=root, rank=rank, processes=processes
        )  # fmt: skip
        failed = self._encode(todo, encode)
        end_launch(None if format == "npz" else self.output)
        return failed

    def on_ray(self, vae: VaeOptions, cluster: ClusterOptions) -> int:
        from kohya_bucket.latents.on_ray import Actors, encode_on_ray

        load, on_gpu = partial(load_vae, **vae.load_options()), not (vae.device or "").startswith("cpu")
        with Actors(load, cluster.concurrency, on_gpu=on_gpu, say=_say) as crew:
            _say_type(crew.facts().computes, f"; stored in {self.recipe.dtype}", self.quiet)
            root, todo = self.source.parts(self, replace(self.recipe, vae=crew.facts().identity), "ray")
            output = cast("Path", self.output)
            return self._encode(todo, partial(encode_on_ray, crew=crew, output_dir=output, images_root=root))

    def _encode(self, todo: list[LatentItems], encode: Callable[..., PrecomputeReport]) -> int:
        from kohya_bucket.latents.encode.worker import joined

        further: list[PrecomputeReport] = []
        failed = 0
        for wanted in todo:
            with scan_progress("encoding", quiet=self.quiet, done_as="encoded") as show:
                report = encode(
                    wanted, batch_size=self.batch_size, workers=self.workers, progress_callback=show, say=_say
                )
            failed += len(report.failed)
            if wanted.further:
                further.append(report)
            elif not self.quiet:
                _print_report(report)
        if further and not self.quiet:
            say("at further sizes:")
            _print_report(joined(further))
        return failed


def _print_report(report: PrecomputeReport) -> None:
    where = "beside the images" if report.output is None else str(report.output)
    for reason, n in report.reasons.items():
        say(f"{n} to do: {reason}")
    elsewhere = f", {report.elsewhere} are for the other processes" if report.elsewhere else ""
    say(
        f"{report.encoded} encoded, {report.current} were current, {len(report.failed)} failed{elsewhere}; "
        f"{counted(report.total, 'image')} in {counted(len(report.buckets), 'bucket')}, {where}"
    )
    if report.encoded:
        seconds = max(report.seconds, 1e-9)
        idle = report.device_idle / seconds
        say(f"{seconds:.1f} s, {report.encoded / seconds:.1f}/s, VAE idle {100 * idle:.0f} % of the time")
    say_first([f"no bucket: {path}: {reason}" for path, reason in report.without_bucket], indent="")


_HOW = (
    "precompute --text encodes the captions of a store: --output latents/ --text-encoder …; or it runs an sd-scripts "
    "trainer until its captions are encoded: accelerate launch -m kohya_bucket.precompute --text flux_train_network.py "
    "--dataset_config my.toml …"
)
_ALLOWED = ("output", "dtype", "device", "encode_batch_size", "collection", "quiet")


def encode_captions(
    context: typer.Context, options: TextOptions, output: Path | None, vae: VaeOptions, batch_size: int | None,
    collection: str, quiet: bool,
) -> None:  # fmt: skip
    """Encode what is missing of the captions of the store in `output`."""
    if output is None or not options.text_encoder:
        raise ConfigError(_HOW)
    what, allowed = f"--text encodes the captions of {output}", ("path", *_ALLOWED, *vars(options))
    others = [name for name in context.params if name not in allowed]
    refuse_beside(context, what, others, context.params["path"] or ())
    from kohya_bucket.latents.encode.precompute import launched, precompute_text
    from kohya_bucket.latents.encode.text_encoder import load_text_encoder
    from kohya_bucket.latents.store.latent_store import LatentStore
    from kohya_bucket.latents.vae.batches import MOST_TOGETHER

    _silence_libraries()
    LatentStore(output)  # no model is loaded for a store that is not there
    rank, processes = launched()
    with scan_progress("encoding", quiet=quiet, done_as="encoded") as show:
        encoder = load_text_encoder(
            options.text_encoder, lengths=options.max_length or [], dtype=vae.dtype, device=vae.device,
            layer=options.layer, apply_mask=options.apply_mask,
        )  # fmt: skip
        _say_type(encoder.computes, "; outputs are stored as they come", quiet)
        report = precompute_text(
            output, encoder, name=collection or "text", batch_size=batch_size or MOST_TOGETHER, progress=show,
            rank=rank, processes=processes,
        )  # fmt: skip
    if not quiet:
        for reason, n in report.reasons.items():
            say(f"{n} to do: {reason}")
        say(f"{report.encoded} encoded, {report.current} were current; {counted(report.total, 'caption')}, {output}")


def _silence_libraries() -> None:
    """What diffusers and transformers log while they load; what keeps them from it is an error of ours."""
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "critical")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")


def load_vae(vae: str, **options: Any) -> Any:
    """An encoder from a hub name, a folder or a .safetensors file, loaded without a word; see `load_encoder`."""
    _silence_libraries()
    try:
        from kohya_bucket.latents.vae.diffusers_vae import load_encoder

        return load_encoder(vae, **options)
    except ModuleNotFoundError as missing:
        raise KohyaBucketError(
            f"a VAE needs {missing.name}, which is not installed: {pip_install('train')}"
        ) from missing


def vae_hash_of(vae: str, family: str) -> str:
    """What a store knows a VAE by, which must be of this family."""
    from kohya_bucket.latents.vae.encoder import encoder_hash

    encoder = load_vae(vae, device="cpu", architecture=family)
    usual_trainer().cache_files().check_encoder(encoder, family)
    return encoder_hash(encoder)
