"""`kohya-bucket compare`: the same images under different rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kohya_bucket.buckets.choices import TRAINERS, RuleOptions
from kohya_bucket.buckets.rules.registry import RULES, is_rule, named_rule, rule_choices
from kohya_bucket.checks import one_of
from kohya_bucket.cli.console import print_table, say, wide_console
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import BATCH_SIZE, AsJson, Quiet, Recursive, RuleArguments, TableOrSources, gpu_counts
from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import counted, one_line

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.buckets.sizes import IntArray
    from kohya_bucket.cli.sources import SizedImages
    from kohya_bucket.originals.loaders import LoaderRun
    from kohya_bucket.reports.compare import Compared

_SD_SCRIPTS = "sd-scripts"  # whose rule has a name of its own here
_LEGEND = (
    "mean crop, 19 of 20 and worst: what is cropped off, on average, of 19 in 20 images, and at most; upscaled: images "
    "smaller than their bucket; steps, left out and repeats: of an epoch of each GPU, in another trainer's own loader, "
    "else by this package's plan; never: images that none of ten epochs trains (of fewer for very many)"
)
_OF_IDLE = "; idle: time in which GPUs wait for one another"


OPTION_GROUPS = {"compare": {"without": ("rule", "preset", "bucket_config", "no_upscale_fit")}}


def compare(
    context: typer.Context,
    path: TableOrSources,
    rules: str = opt(
        "kohya,novelai,exact,auto", lambda: f"Names, separated by commas: {', '.join([*comparable(), *groups()])}."
    ),
    *,
    arch: str | None = opt(None),
    batch_size: int = opt(4, "", *BATCH_SIZE, min=1),
    gpus: str = opt("1"),
    as_json: AsJson = False,
    options: RuleArguments,
    recursive: Recursive = True,
    workers: int | None = opt(None, usual=False, min=1),
    quiet: Quiet = False,
) -> None:
    from kohya_bucket.cli.sources import sizes_of
    from kohya_bucket.images.formats import VIDEO_EXTENSIONS
    from kohya_bucket.images.listing import list_images
    from kohya_bucket.reports.compare import compare_rules

    options, counts = options.for_arch(context, arch), gpu_counts(gpus)
    names = names_of(rules, comparable(), groups())
    clips = list_images([p for p in path if Path(p).is_dir()], recursive=recursive, extensions=VIDEO_EXTENSIONS)
    if clips and not (quiet or as_json):
        say(f"{counted(len(clips), 'clip')} left out: only images are compared", err=True)
    if {*_own(), _SD_SCRIPTS}.intersection(names):
        options.check()
    images = sizes_of(path, recursive=recursive, workers=workers, quiet=quiet or as_json)
    chosen = [(name, compared_rule(name, options, images.sizes)) for name in names]
    about = {"images": len(images.sizes), "unreadable": images.unreadable, "batch_size": batch_size}
    of_gpus = []
    for n in counts:
        results = compare_rules(chosen, images.sizes, batch_size, n)
        of_gpus.append({**about, "gpus": n, "rules": [result.as_dict() for result in results]})
        if not as_json:
            _print(images, results, options.size, batch_size, n)
    if as_json:  # of one number of GPUs no list
        typer.echo(json.dumps(of_gpus if len(of_gpus) > 1 else of_gpus[0], indent=2))


def _print(images: SizedImages, results: list[Compared], size: tuple[int, int], batch_size: int, gpus: int) -> None:
    from kohya_bucket.reports.compare import conclusion

    console = wide_console()
    on = f" on each of {gpus} GPUs" if gpus > 1 else ""
    console.print(f"{images}, at {size[0]}x{size[1]}, batches of {batch_size}{on}")
    rows = []
    for s, trained, name in ((result.summary, result.trained, one_line(result.name)) for result in results):
        row = {
            "rule": name,
            "buckets": str(s.buckets),
            "mean crop": f"{s.mean_crop:.2%}",
            "19 of 20": f"{s.p95_crop:.2%}",
        }
        row |= {"worst": f"{s.worst_crop:.2%}", "upscaled": f"{s.enlarged:.1%}", "no bucket": str(s.unplaced)}
        rows.append(row | _of_epoch(trained, gpus))
    print_table(console, rows)
    console.print(_LEGEND + _OF_IDLE * (gpus > 1), style="dim", soft_wrap=True)
    for result in results:
        for reason, count in result.reasons.items():
            console.print(f"{result.name}: {count:,} without a bucket: {reason}", soft_wrap=True)
    if len(results) > 1:
        console.print(conclusion(results), soft_wrap=True)


def _of_epoch(trained: LoaderRun | None, gpus: int) -> dict[str, str]:
    if trained is None:
        return dict.fromkeys(("steps", "left out", "never", "repeats", *["idle"] * (gpus > 1)), "?")
    row = {"steps": trained.steps, "left out": trained.left_out, "never": trained.never, "repeats": trained.repeated}
    idle = {"idle": f"{trained.idle:.0%}"} if gpus > 1 else {}
    return {name: f"{round(number):,}" for name, number in row.items()} | idle


def _own() -> dict[str, Mapping[str, Any]]:
    """The package's own rules and their variants, each with what it changes of the options."""
    out: dict[str, Mapping[str, Any]] = {}
    for name, rule in RULES.items():
        if not rule.argument:
            base = {"rule": name, **rule.not_taken}
            out |= {name: base, **{variant: {**base, **changes} for variant, changes in rule.variants.items()}}
    return out


def comparable() -> list[str]:
    return [*_own(), *(name for name, rule in rule_choices().items() if rule.argument), *_trainers()]


def _trainers() -> list[str]:
    """Each with its own loader, where that is known here."""
    return [_SD_SCRIPTS, *TRAINERS]


def groups() -> dict[str, list[str]]:
    """Names that stand for several."""
    return {"trainers": _trainers(), "all": [*_own(), *_trainers()]}


def names_of(text: str, comparable_names: Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The names in `kohya,trainers`, each once, groups taken apart. `ConfigError` where there is none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"--rules is {text!r}, but must be names separated by commas: {', '.join(comparable_names)}")
    return list(dict.fromkeys(name for part in parts for name in groups.get(part, (part,))))


def compared_rule(name: str, options: RuleArguments, sizes: IntArray) -> BucketRule:
    """A rule by one of the names in `comparable()`; other trainers' at the side of the resolution's area.

    `sizes` [N, 2] are for rules that are made from the images.
    """
    if name in TRAINERS:
        width, height = options.size
        rule: BucketRule = TRAINERS[name].load()(round((width * height) ** 0.5))
        return rule
    options_of_name = _own() | {_SD_SCRIPTS: {"rule": "kohya", **asdict(RuleOptions())}}  # it has none of these
    if name not in options_of_name and not is_rule(name):
        one_of("rule", name, [*comparable(), *groups()], ConfigError)
    return replace(options, **options_of_name.get(name) or {"rule": name, **named_rule(name).not_taken}).make(sizes)
