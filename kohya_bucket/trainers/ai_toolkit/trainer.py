"""ai-toolkit as the commands see it: its configs are jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.trainers.door.face import Asked, OneItem, Trainer, Way

if TYPE_CHECKING:
    from kohya_bucket.trainers.door.door import TrainerDoor
    from kohya_bucket.trainers.door.file_findings import Section
    from kohya_bucket.trainers.door.findings import Finding, Teller
    from kohya_bucket.trainers.door.options import AdapterOptions
    from kohya_bucket.trainers.door.plan import Plan
    from kohya_bucket.trainers.door.subject import HeaderReader, Subject


class AiToolkit(Trainer):
    """ostris/ai-toolkit."""

    name, package, marks = "ai-toolkit", "toolkit", ("../run.py", "data_loader.py")
    commands = ("plan", "analyze", "simulate", "doctor")
    turns_images = True

    def door(self) -> TrainerDoor:
        from kohya_bucket.trainers.ai_toolkit.door import DOOR

        return DOOR

    def recognises(self, config: Path, content: Any) -> bool:
        from kohya_bucket.trainers.ai_toolkit.config import is_job
        from kohya_bucket.trainers.door.config_source import YAML

        # No other trainer's configs are YAML, and what is wrong with one is to be said.
        return config.suffix.lower() in YAML or is_job(content)

    def plan(
        self, asked: Asked, gpus: Sequence[int] | None, accumulate: int | None, images: bool, tell: Teller
    ) -> Plan:
        from kohya_bucket.trainers.ai_toolkit.config import read_job
        from kohya_bucket.trainers.ai_toolkit.plan import plan_of

        job = read_job(asked.file)
        with tell.progress("reading images and clips") as progress:
            return plan_of(job, gpus or [1], accumulate, images, progress)

    def examine(self, asked: Asked, tell: Teller, quick: bool) -> Iterator[Section]:
        from kohya_bucket.trainers.ai_toolkit.config import read_job
        from kohya_bucket.trainers.ai_toolkit.plan import job_section
        from kohya_bucket.trainers.door.environment import packages_section

        job = read_job(asked.file)
        yield job_section(job, tell.progress, decode=not quick)
        yield packages_section(job.arch)

    def subjects(
        self, asked: Asked, batch_size: int | None, reader: HeaderReader
    ) -> tuple[list[Subject], list[Finding]]:
        from kohya_bucket.trainers.ai_toolkit.config import read_job
        from kohya_bucket.trainers.ai_toolkit.plan import subjects_of

        return subjects_of(read_job(asked.file), batch_size, reader)

    def ways(self, asked: Asked, item: OneItem, focus: str | None) -> tuple[list[Way], AdapterOptions]:
        from kohya_bucket.trainers.ai_toolkit.config import read_job
        from kohya_bucket.trainers.ai_toolkit.plan import ways_of
        from kohya_bucket.trainers.door.options import AdapterOptions

        job = read_job(asked.file)
        if not job.datasets:
            raise ConfigError(f"{job.path}: {next(iter(job.findings)).text}")
        ways = ways_of(job, item)
        if focus is not None:
            raise KohyaBucketError(f"{job.path} is a job of ai-toolkit, which cuts in the middle: leave out --focus")
        return ways, AdapterOptions()


TRAINER = AiToolkit()
