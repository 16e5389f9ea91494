"""What a training trains: the items that its config names, from caches that are current. Nothing else, and no fewer.

Whatever else lies in a cache folder is named and left alone. What cannot be trained ends the run before its first step,
with the commands that make it.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kohya_bucket.adapter.door import end_run
from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.images.listing import from_here
from kohya_bucket.latents.fingerprint import Reason
from kohya_bucket.musubi.caching.files import TensorFile
from kohya_bucket.musubi.caching.judge import Caches, holds_clips
from kohya_bucket.musubi.caching.made_by import why_made_otherwise
from kohya_bucket.musubi.caching.session import why_unreadable
from kohya_bucket.musubi.caching.sources import CacheName, Source, folder_of, foreign_names
from kohya_bucket.musubi.objects import Bucket, Item
from kohya_bucket.texts import counted, one_line, some

__all__ = ["TrainingItems", "items_of_config", "only_these", "pick_out"]

_THREADS = 8
_SHOWN = 5

logger = logging.getLogger("kohya_bucket")


@dataclass
class TrainingItems:
    """The files of one data set that are trained, by path."""

    files: dict[str, tuple[CacheName, TensorFile]]

    def pick_out_of(self, buckets: dict[Bucket, list[Item]]) -> None:
        """Leave only these in the buckets, each with what has the same shapes.

        musubi-tuner gives a clip the bucket of its size only where `enable_bucket` is set, but caches it at that size.
        """
        picked: dict[Bucket, dict[tuple[Any, ...], list[Item]]] = defaultdict(lambda: defaultdict(list))
        seen = set()
        for bucket, items in buckets.items():
            for item in items:
                path = os.path.normpath(item.latent_cache_path)
                if path in self.files:
                    seen.add(path)
                    name, header = self.files[path]
                    key = bucket if name.clip is None else (*name.size, *bucket[2:])
                    picked[key][_stacked(header)].append(item)
        if len(seen) < len(self.files):
            lost = sorted(self.files.keys() - seen)
            _end(f"musubi-tuner does not find {some(lost)} in its cache folder: are there brackets in its path?")
        buckets.clear()
        for key, by_shape in picked.items():
            for number, shape in enumerate(sorted(by_shape)):
                buckets[key if len(by_shape) == 1 else (*key, str(number))] = by_shape[shape]


_active: list[TrainingItems] = []


@contextmanager
def only_these(items: TrainingItems) -> Iterator[None]:
    """Buckets that are made meanwhile hold these items, see `pick_out`."""
    _active.append(items)
    try:
        yield
    finally:
        _active.remove(items)


def pick_out(buckets: dict[Bucket, list[Item]]) -> None:
    """Leave in buckets that musubi-tuner is about to take what is to be trained."""
    for items in _active:
        items.pick_out_of(buckets)


@dataclass
class _Judged:
    """One data set."""

    files: dict[str, tuple[CacheName, TensorFile]] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)
    wrong: dict[int, dict[str, list[Reason]]] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)


def items_of_config(caches: Caches, config: str) -> TrainingItems:
    """The items of one data set, all with current caches; the end of the run where there is one without.

    Args:
        caches: of the data set.
        config: path of the dataset config, for the commands that are shown.
    """
    folder, family = str(caches.dataset.cache_directory), caches.dataset.architecture
    if foreign := foreign_names(folder, family, clips=holds_clips(caches.dataset)):
        _end(
            f"{from_here(folder)} holds {some(foreign)}, which musubi-tuner takes for a cache of {family} by its name "
            "and cannot read: move it elsewhere"
        )
    judged = _judge(caches)
    if not caches.table.sources:
        _end(_why_no_items(caches))
    _leave_out_unreadable(caches, judged)
    if judged.wrong or (judged.left_out and not judged.files):
        _end(_what_to_do(caches, judged, config))
    if is_first_process():
        _report(caches, judged)
    repeated = caches.dataset.num_repeats > 0  # else musubi-tuner hands out none of them
    return TrainingItems({os.path.normpath(path): found for path, found in judged.files.items() if repeated})


def _why_no_items(caches: Caches) -> str:
    folder, where = folder_of(caches.dataset), from_here(folder_of(caches.dataset))
    line = f"{where} has no items with captions" if Path(folder).is_dir() else f"{where} does not exist"
    if not caches.named:
        return f"{line}: correct its path in the config, or remove its data set"
    return (
        f"{line}, and what lies in {from_here(str(caches.dataset.cache_directory))} is trained only where the config "
        "names it: bring the files back, or list them in image_jsonl_file or video_jsonl_file"
    )


def _end(line: str) -> NoReturn:
    """End the run; of the processes of one machine, which have the same files, one says why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        end_run(line)
    raise SystemExit(2)


def _judge(caches: Caches) -> _Judged:
    judged = _Judged()
    with ThreadPoolExecutor(_THREADS, "kohya-bucket-caches") as pool:
        results = list(pool.map(lambda source: _why_wrong(caches, source), caches.table.sources))
    for source, result in zip(caches.table.sources, results, strict=True):
        judged.texts |= set(result.texts)
        if result.unreadable:
            judged.left_out[source.number] = result.unreadable
        elif result.wrong:
            judged.wrong[source.number] = result.wrong
        else:
            judged.files |= result.files
    for text, kind in ((False, "latents"), (True, "text")):
        for number, reasons in _made_otherwise(caches, text=text):
            judged.wrong.setdefault(number, {})[kind] = reasons
    return judged


class _Result(NamedTuple):
    """One item: its files, or why there are none."""

    files: dict[str, tuple[CacheName, TensorFile]]
    texts: tuple[str, ...] = ()
    wrong: dict[str, list[Reason]] = {}  # noqa: RUF012
    unreadable: str = ""


def _why_wrong(caches: Caches, source: Source) -> _Result:
    try:
        caption = str(caches.dataset.datasource.get_caption(source.number)[1])
    except (OSError, ValueError) as error:
        return _Result({}, unreadable=f"its caption cannot be read ({error})")
    found = caches.latents(source)
    text = caches.text(source, caption, clips=[name.clip for name in found.files if name.clip] or None)
    wrong = {kind: list(one.reasons) for kind, one in (("latents", found), ("text", text)) if one.reasons}
    files = {name.path: (name, header) for name, header in zip(found.files, found.headers, strict=True)}
    return _Result(files, text.files, wrong)


def _made_otherwise(caches: Caches, *, text: bool) -> Iterator[tuple[int, list[Reason]]]:
    """Items whose caches were made by other models or options than most others of the data set."""
    makers = sorted(caches.makers[text].values(), key=lambda maker: len(maker[1]))
    for made_by, numbers in makers[:-1]:
        reasons = why_made_otherwise(made_by, makers[-1][0], text=text)
        yield from ((number, reasons) for number in numbers if reasons)


def _leave_out_unreadable(caches: Caches, judged: _Judged) -> None:
    """What has no cache because it cannot be read is left out; the first that can be read ends the search."""
    for source in caches.table.sources:
        if source.number in judged.wrong:
            why = why_unreadable(caches.dataset, source.number, caches.selector)
            if not why:
                return
            judged.left_out[source.number] = why
            del judged.wrong[source.number]


def _what_to_do(caches: Caches, judged: _Judged, config: str) -> str:
    names = {source.number: source.name for source in caches.table.sources}
    if not judged.wrong:
        out = [f"{names[number]}: {why}" for number, why in sorted(judged.left_out.items())]
        where = from_here(folder_of(caches.dataset))
        return f"not one of {counted(len(names), 'item')} in {where} can be read: {some(out)}"
    lines = [
        f"{names[number]} ({', '.join(f'{kind}: {reasons[0]}' for kind, reasons in wrong.items())})"
        for number, wrong in sorted(judged.wrong.items())
    ]
    kinds = {kind for wrong in judged.wrong.values() for kind in wrong}
    made = [getattr(caches.family, kind) for kind in ("latents", "text") if kind in kinds]
    package = caches.package or Path()
    commands = " and ".join(
        f"`python -m kohya_bucket.launch {from_here(str(package / name))}.py --dataset_config {config} …`"
        for name in made
    )
    where = from_here(folder_of(caches.dataset))
    of_all = f"{len(lines)} of {counted(len(names), 'item')} in {where}"
    return (
        f"{of_all} cannot be trained from their caches: {some(lines, _SHOWN)}. Make them with {commands}; what is "
        "current is kept"
    )


def _report(caches: Caches, judged: _Judged) -> None:
    if judged.left_out:
        lines = [
            f"{source.name}: {judged.left_out[source.number]}"
            for source in caches.table.sources
            if source.number in judged.left_out
        ]
        logger.warning("%s left out: %s", counted(len(lines), "item"), one_line(some(lines, _SHOWN)))
    out = {source.stem for source in caches.table.sources if source.number in judged.left_out}
    others = [name.path for stem, of_stem in caches.named.items() if stem not in out for name in of_stem]
    texts = judged.texts | {caches.text_path(source).name for source in caches.table.sources}
    unasked = [Path(path).name for path in others if path not in judged.files]
    unasked += [name for name in caches.texts if name not in texts]
    if unasked:
        logger.warning(
            "left alone in %s, because the config does not ask for it: %s (%s)",
            from_here(str(caches.dataset.cache_directory)),
            counted(len(unasked), "file"),
            one_line(some(sorted(unasked), _SHOWN)),
        )


def _stacked(header: TensorFile) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """What must be equal in a batch: names and shapes of the tensors that are stacked."""
    return tuple(sorted((name, shape) for name, shape in header.shapes.items() if not name.startswith("varlen_")))
