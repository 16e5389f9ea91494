"""What a batch draws follows from its seed alone."""

import io
import logging
import random

import pytest
import rich.style
from rich.console import Console
from rich.logging import RichHandler

from kohya_bucket.trainers.sdscripts.batches import own_random


class OlderHandler(logging.Handler):
    """Draws as every rich before 15 does, whichever is installed."""

    def emit(self, record):
        rich.style.randint(0, 999999)


@pytest.mark.parametrize("make", [OlderHandler, lambda: RichHandler(console=Console(file=io.StringIO()))])
def test_a_line_that_is_logged_meanwhile_changes_nothing(monkeypatch, make):
    monkeypatch.setattr(rich.style, "randint", random.randint, raising=False)
    logger = logging.Logger("any")
    logger.addHandler(make())

    def drawn(*lines):
        with own_random(7):
            first = random.random()
            for line in lines:
                logger.warning(line)
            return first, random.random()

    before = random.getstate()
    assert drawn("read again", "read at last") == drawn()
    assert random.getstate() == before
