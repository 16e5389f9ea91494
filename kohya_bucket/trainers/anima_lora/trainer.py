"""anima_lora as the launcher sees it; the commands do not take its configs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.trainers.door.face import Trainer

if TYPE_CHECKING:
    from kohya_bucket.trainers.door.door import TrainerDoor


class AnimaLora(Trainer):
    """sorryhyun/anima_lora."""

    name, package = "anima_lora", "library"
    marks = ("../train.py", "anima/text_strategies.py", "datasets/base.py")

    def door(self) -> TrainerDoor:
        from kohya_bucket.trainers.anima_lora.door import DOOR

        return DOOR


TRAINER = AnimaLora()
