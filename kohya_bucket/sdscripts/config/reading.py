"""What the readers of the three kinds of datasets share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.sdscripts.config.model import DatasetConfig, SubsetConfig
from kohya_bucket.sdscripts.config.release import NEWEST, Release
from kohya_bucket.sdscripts.config.schema import Kind

__all__ = ["Reading", "usable_subsets"]


@dataclass
class Reading:
    """What one run over a config carries along.

    Attributes:
        findings: where to report.
        release: the version of sd-scripts to follow.
        base: the folder of the config file.
        check_captions: open every caption file, as sd-scripts does.
        metadata_cache: the option of that name, for sizes that decide which images there are.
        written_caches: image lists that sd-scripts would write into `metadata_cache.json` files while it reads
            this config, and would read again for later datasets. Nothing is written here.
    """

    findings: Findings
    release: Release = NEWEST
    base: Path | None = None
    check_captions: bool = True
    metadata_cache: str = "auto"
    written_caches: dict[str, list[str]] = field(default_factory=dict)


def usable_subsets(dataset: DatasetConfig, training: bool, findings: Findings) -> Iterator[SubsetConfig]:
    """The subsets that sd-scripts does not pass over: repeats of 1 or more, and each folder or file once.

    A caller that finds a subset empty must `send(False)`: it then does not count as given.
    """
    seen: set[tuple[str | None, ...]] = set()
    for subset in dataset.subsets:
        repeats = subset.num_repeats if training or subset.kind is not Kind.DREAMBOOTH else 1
        name = subset.metadata_file if subset.kind is Kind.FINE_TUNING else subset.image_dir
        if repeats < 1:
            message = f"num_repeats is {repeats}, so sd-scripts skips {name!r}"
            findings.warning("no-repeats", subset.place, message, "set it to 1 or more, or remove the subset")
            continue
        if subset.identity in seen:
            message = f"{name!r} was given before in this dataset; sd-scripts uses the first and skips this one"
            findings.warning("duplicate-subset", subset.place, message, "remove one; use num_repeats to repeat it")
            continue
        if (yield subset) is not False:
            seen.add(subset.identity)
