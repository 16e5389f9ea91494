"""anima_lora as the launcher sees it. Of the commands, `doctor` takes its configs, for what is known of its folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.trainers.door.face import Asked, Trainer

if TYPE_CHECKING:
    from kohya_bucket.trainers.door.door import TrainerDoor
    from kohya_bucket.trainers.door.file_findings import Section
    from kohya_bucket.trainers.door.findings import Teller


class AnimaLora(Trainer):
    """sorryhyun/anima_lora."""

    name, package = "anima_lora", "library"
    marks = ("../train.py", "anima/text_strategies.py", "datasets/base.py")
    commands = ("doctor",)

    def door(self) -> TrainerDoor:
        from kohya_bucket.trainers.anima_lora.door import DOOR

        return DOOR

    def recognises(self, config: Path, content: Any) -> bool:
        from kohya_bucket.trainers.anima_lora.resized import RESIZED, SOURCE

        return isinstance(content, Mapping) and {SOURCE, RESIZED} <= content.keys()

    def examine(self, asked: Asked, tell: Teller, quick: bool) -> Iterator[Section]:
        from kohya_bucket.trainers.anima_lora.resized import resized_section
        from kohya_bucket.trainers.door.config_source import load_source
        from kohya_bucket.trainers.door.environment import packages_section

        yield resized_section(asked.file, load_source(asked.file, self.name).data)
        yield packages_section("anima")


TRAINER = AnimaLora()
