"""What a training trains: the items that its config names, from caches that are current. Nothing else, and no fewer.

Whatever else lies in a cache folder is named and left alone. What cannot be trained ends the run before its first step,
with the commands that make it.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from kohya_bucket.checks import is_first_process
from kohya_bucket.extras import argument
from kohya_bucket.images.listing import from_here
from kohya_bucket.latents.fingerprint import StaleReason
from kohya_bucket.texts import counted, one_line, some
from kohya_bucket.trainers.door.ranks import end_run
from kohya_bucket.trainers.musubi.cache_files import TensorFile, why_made_otherwise
from kohya_bucket.trainers.musubi.caches import Caches, ItemCaches
from kohya_bucket.trainers.musubi.caching import why_unreadable
from kohya_bucket.trainers.musubi.items import Source, folder_of, foreign_names
from kohya_bucket.trainers.musubi.objects import BucketKey, CachedItem

_THREADS = 8
_SHOWN = 5

logger = logging.getLogger("kohya_bucket")


Trained = dict[str, tuple[tuple[int, int], TensorFile]]
"""The files of one dataset that are trained, by path, with the sizes of their buckets."""


def pick_out_of(buckets: dict[BucketKey, list[CachedItem]], trained: Trained) -> None:
    """Leave only what is trained in the buckets, each with what has the same shapes.

    musubi-tuner finds buckets by the sizes in names. But a clip that is cached at the size of its bucket gets that one
    only where `enable_bucket` is set.
    """
    picked: dict[BucketKey, dict[tuple[Any, ...], list[CachedItem]]] = defaultdict(lambda: defaultdict(list))
    seen = set()
    for bucket, items in buckets.items():
        for item in items:
            path = os.path.normpath(item.latent_cache_path)
            if path in trained:
                seen.add(path)
                size, header = trained[path]
                key = (*size, *bucket[2:])
                stacked = {one: shape for one, shape in header.shapes.items() if not one.startswith("varlen_")}
                picked[key][tuple(sorted(stacked.items()))].append(item)
    if len(seen) < len(trained):
        lost = sorted(trained.keys() - seen)
        _end(f"musubi-tuner does not find {some(lost)} in its cache folder")
    buckets.clear()
    for key, by_shape in picked.items():
        for number, shape in enumerate(sorted(by_shape)):
            buckets[key if len(by_shape) == 1 else (*key, str(number))] = by_shape[shape]


def items_of_config(caches: Caches, config: str) -> Trained:
    """The files of one dataset, whose items all have current caches; the end of the run where there is one without.

    Args:
        caches: of the dataset.
        config: path of the dataset config, for the commands that are shown.
    """
    folder, family = str(caches.dataset.cache_directory), caches.dataset.architecture
    if foreign := foreign_names(folder, family, clips=caches.clips):
        _end(
            f"{from_here(folder)} holds {some(foreign)}, which musubi-tuner takes for a cache of {family} by its name "
            "and cannot read: move it elsewhere"
        )
    if not caches.table.sources:
        _end(_why_no_items(caches))
    judged = _Judged(caches)
    if judged.wrong or not judged.files:
        _end(judged.what_to_do(config))
    if is_first_process():
        judged.report()
    repeated = caches.dataset.num_repeats > 0  # else musubi-tuner hands out none of them
    return {os.path.normpath(path): bucket_and_header for path, bucket_and_header in judged.files.items() if repeated}


def _why_no_items(caches: Caches) -> str:
    folder, where = folder_of(caches.dataset), from_here(folder_of(caches.dataset))
    if caches.uncaptioned:
        return f"nothing of {where} is trained: {caches.uncaptioned}"
    line = f"{where} has no items with captions" if Path(folder).is_dir() else f"{where} does not exist"
    if not caches.named:
        return f"{line}: correct its path in the config, or remove its dataset"
    return (
        f"{line}, and what lies in {from_here(str(caches.dataset.cache_directory))} is trained only where the config "
        "names it: bring the files back, or list them in image_jsonl_file or video_jsonl_file"
    )


def _end(line: str) -> NoReturn:
    """End the run; of the processes of one machine, which have the same files, one says why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        end_run(line)
    raise SystemExit(2)


class _Judged:
    """One dataset.

    Attributes:
        files: what is trained, by path.
        wrong: {place in the dataset's list: {"latents" or "text": why they do not serve}}.
        left_out: why an item cannot be read, by its place.
    """

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self.wrong: dict[int, dict[str, list[StaleReason]]] = {}
        self.left_out: dict[int, str] = {}
        latents_of: dict[int, ItemCaches] = {}
        self._texts = {caches.text_path(source).name for source in caches.table.sources}
        with ThreadPoolExecutor(_THREADS, "kohya-bucket-caches") as pool:
            results = list(pool.map(self._look, caches.table.sources))
        for source, result in zip(caches.table.sources, results, strict=True):
            if isinstance(result, str):
                self.left_out[source.number] = result
                continue
            latents_of[source.number] = result[0]
            self._texts |= set(result[1].files)
            kinds = zip(("latents", "text"), result, strict=True)
            if wrong := {kind: list(one.reasons) for kind, one in kinds if one.reasons}:
                self.wrong[source.number] = wrong
        self._compare_makers()
        self._leave_out_unreadable()
        self.files = {
            name.path: (caches.selector.get_bucket_resolution(name.size), header)
            for number, latents in latents_of.items()
            if number not in self.left_out
            for name, header in latents.latents
        }

    def _look(self, source: Source) -> tuple[ItemCaches, ItemCaches] | str:
        """What there is of an item's latents and of its caption, or why it cannot be read."""
        try:
            caption = str(self.caches.dataset.datasource.get_caption(source.number)[1])
        except (OSError, ValueError) as error:
            return f"its caption cannot be read ({error})"
        latents = self.caches.latents(source)
        clips = [name.clip for name, _ in latents.latents if name.clip]
        return latents, self.caches.text(source, caption, clips=clips or None)

    def _compare_makers(self) -> None:
        """Items whose caches were made by other models or options than most others of the dataset do not serve."""
        for text, kind in ((False, "latents"), (True, "text")):
            makers = sorted(self.caches.makers[text].values(), key=lambda maker: len(maker[1]))
            for made_by, numbers in makers[:-1]:
                if reasons := why_made_otherwise(made_by, makers[-1][0], text=text):
                    for number in numbers:
                        self.wrong.setdefault(number, {})[kind] = reasons

    def _leave_out_unreadable(self) -> None:
        """What has no cache because it cannot be read is left out.

        The search ends when as many that can be read are found as are named: then all must be cached anyhow.
        """
        readable = 0
        for number in self.caches.table.at:
            if number in self.wrong and readable < _SHOWN:
                why = why_unreadable(self.caches.dataset, number, self.caches.selector)
                if not why:
                    readable += 1
                    continue
                self.left_out[number] = why
                del self.wrong[number]

    def what_to_do(self, config: str) -> str:
        """Why the run ends, and the commands after which it does not."""
        names = {source.number: source.name for source in self.caches.table.sources}
        where = from_here(folder_of(self.caches.dataset))
        if not self.wrong:
            return f"none of {counted(len(names), 'item')} in {where} can be read: {some(self.lines_of_left_out())}"
        lines = [
            f"{names[number]} ({', '.join(f'{kind}: {reasons[0]}' for kind, reasons in wrong.items())})"
            for number, wrong in sorted(self.wrong.items())
        ]
        kinds = {kind for wrong in self.wrong.values() for kind in wrong}
        made = [getattr(self.caches.family, kind) for kind in ("latents", "text") if kind in kinds]
        package = self.caches.package or Path()
        scripts = [argument(from_here(f"{package / name}.py")) for name in made]
        commands = " and ".join(
            f"`python -m kohya_bucket.launch {script} --dataset_config {argument(config)} …`" for script in scripts
        )
        return (
            f"{len(lines)} of {counted(len(names), 'item')} in {where} cannot be trained from their caches: "
            f"{some(lines, _SHOWN)}. Make them with {commands}; what is current is kept"
        )

    def lines_of_left_out(self) -> list[str]:
        return [f"{self.caches.table.at[number].name}: {why}" for number, why in sorted(self.left_out.items())]

    def report(self) -> None:
        """What is left out, and what is left alone."""
        table = self.caches.table
        if self.caches.uncaptioned:
            logger.warning("%s", self.caches.uncaptioned)
        if lines := self.lines_of_left_out():
            logger.warning("%s left out: %s", counted(len(lines), "item"), one_line(some(lines, _SHOWN)))
        out = {table.at[number].stem for number in self.left_out}
        others = [name.path for stem, of_stem in self.caches.named.items() if stem not in out for name in of_stem]
        unasked = [os.path.basename(path) for path in others if path not in self.files]
        unasked += [name for name in self.caches.texts if name not in self._texts]
        if unasked:
            logger.warning(
                "left alone in %s, because the config does not ask for it: %s (%s)",
                from_here(str(self.caches.dataset.cache_directory)),
                counted(len(unasked), "file"),
                one_line(some(sorted(unasked), _SHOWN)),
            )
