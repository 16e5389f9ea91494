"""The work of `precompute`, once all that it was given is checked: encode, here or on a cluster, and say what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.cli.console import plain_console, say
from kohya_bucket.cli.engines import engine_of
from kohya_bucket.cli.precompute_items import parts_of
from kohya_bucket.latents.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from rich.console import Console

    from kohya_bucket.cli.cluster_options import ClusterOptions
    from kohya_bucket.cli.encoders import VaeOptions
    from kohya_bucket.cli.precompute_items import Chosen, Part, Planned
    from kohya_bucket.latents.encode.worker import PrecomputeReport
    from kohya_bucket.latents.items import EncodeOptions

__all__ = ["Work"]


@dataclass(frozen=True)
class Work:
    """What is to be encoded, and how, wherever that happens. Both methods give how many images could not be."""

    source: Chosen | Planned
    recipe: EncodeOptions
    output: Path | None
    hash: bool
    quiet: bool
    batch_size: int
    workers: int | None
    console: Console = field(default_factory=partial(plain_console, stderr=True))

    def here(self, vae: VaeOptions, format: str, sd_scripts: str) -> int:
        from kohya_bucket.latents.encode.precompute import encode_items, end_launch, launched
        from kohya_bucket.latents.npz.names import paths_of_run
        from kohya_bucket.latents.vae.encoder import encoder_hash

        encoder = vae.load()
        todo = self._parts(encoder_hash(encoder), "local")
        family = ARCHITECTURES.get(vae.arch or str(getattr(encoder, "architecture", "")))
        options: list[dict[str, Any]] = [{"format": format, "architecture": vae.arch, "sd_scripts": sd_scripts}]
        options *= len(todo)
        if format == "npz" and family is not None and todo:  # without one, `encode_items` says what is missing
            wanted = [part.wanted for part in todo]
            paths = paths_of_run(wanted, family.read_by(sd_scripts), self.output, todo[0].root)
            options = [one | {"npz_paths": its} for one, its in zip(options, paths, strict=True)]
        rank, processes = launched()
        encode = partial(encode_items, encoder=encoder, rank=rank, processes=processes)
        failed = self._encode(todo, encode, options)
        end_launch(None if format == "npz" else self.output)
        return failed

    def on_ray(self, vae: VaeOptions, cluster: ClusterOptions) -> int:
        from kohya_bucket.latents.on_ray.encode_on_ray import encode_on_ray, encoders

        on_gpu = not (vae.device or "").startswith("cpu")
        with encoders(vae.load, cluster.concurrency, on_gpu=on_gpu, say=self._say) as crew:
            todo = self._parts(crew.facts().identity, "ray")
            return self._encode(todo, partial(encode_on_ray, crew=crew), [{}] * len(todo))

    def _parts(self, encoder: str, engine: str) -> list[Part]:
        recipe = replace(self.recipe, vae=encoder)
        return parts_of(
            self.source, recipe, self.output, content_hash=self.hash, quiet=self.quiet, engine=engine_of(engine)
        )  # fmt: skip

    def _encode(self, todo: list[Part], encode: Callable[..., PrecomputeReport], options: list[dict[str, Any]]) -> int:
        """Encode the parts, each with its own `options`."""
        from kohya_bucket.cli.precompute_console import Shown, print_report
        from kohya_bucket.latents.encode.worker import joined

        further: list[PrecomputeReport] = []
        failed = 0
        for part, own in zip(todo, options, strict=True):
            with Shown(self.console, self.quiet) as show:
                report = encode(
                    part.wanted, output_dir=self.output, images_root=part.root, batch_size=self.batch_size,
                    workers=self.workers, progress_callback=show, say=self._say, **own,
                )  # fmt: skip
            failed += len(report.failed)
            if part.wanted.further:
                further.append(report)
            elif not self.quiet:
                print_report(report)
        if further and not self.quiet:
            say("at further sizes:")
            print_report(joined(further))
        return failed

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)
