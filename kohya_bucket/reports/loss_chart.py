"""What rules crop off at each aspect, as curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kohya_bucket.buckets import BucketRule
from kohya_bucket.reports.drawing import Drawing

__all__ = ["loss_chart"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1180, 420, 64, 24, 96, 44
_COLOURS = ("#1f5fa8", "#d9650b", "#2b8a3e", "#9c36b5", "#c92a2a", "#0b7285", "#5f3dc4", "#846300", "#555555")
_TICKS = (0.25, 0.33, 0.5, 0.67, 0.75, 1, 1.33, 1.5, 2, 3, 4)
_LONG_SIDE = 20_000


def loss_chart(rules: Sequence[tuple[str, BucketRule]], title: str, reach: float = 4.0, steps: int = 1200) -> Drawing:
    """Crop loss of each rule over aspects from 1/`reach` to `reach`, for images large enough for any bucket.

    Gaps in a curve are aspects for which the rule has no bucket.
    """
    drawing = Drawing(_WIDTH, _HEIGHT, title)
    drawing.text(_LEFT, 24, title, size=18, bold=True)
    drawing.text(_LEFT, 80, "share cropped off", size=12, colour="#555555")
    logs = np.linspace(-np.log(reach), np.log(reach), steps)
    aspects = np.exp(logs)
    sizes = np.rint(np.stack([np.minimum(aspects, 1), np.minimum(1 / aspects, 1)], axis=1) * _LONG_SIDE)
    losses = [rule.place(sizes.astype(np.int32)).crop_loss for _, rule in rules]
    most = max(0.05, float(np.nanmax([np.nanmax(loss) for loss in losses])))
    ceiling = float(np.ceil(most * 20) / 20)

    def across(log_aspect: float) -> float:
        return _LEFT + (log_aspect / math.log(reach) + 1) / 2 * (_WIDTH - _LEFT - _RIGHT)

    def down(loss: float) -> float:
        return _HEIGHT - _BOTTOM - loss / ceiling * (_HEIGHT - _TOP - _BOTTOM)

    for share in np.linspace(0, ceiling, 6):
        drawing.line([(_LEFT, down(share)), (_WIDTH - _RIGHT, down(share))], "#e3e3e3")
        drawing.text(_LEFT - 8, down(share), f"{share:.0%}", size=11, colour="#555555", anchor="end")
    for tick in (t for t in _TICKS if 1 / reach - 1e-9 <= t <= reach):
        x = across(float(np.log(tick)))
        drawing.line([(x, _HEIGHT - _BOTTOM), (x, _HEIGHT - _BOTTOM + 5)], "#8a8a8a")
        drawing.text(x, _HEIGHT - _BOTTOM + 15, f"{tick:g}", size=11, colour="#555555", anchor="middle")
    drawing.text(_WIDTH - _RIGHT, _HEIGHT - 10, "width / height", size=12, colour="#555555", anchor="end")
    x = float(_LEFT)
    for i, ((name, _), loss) in enumerate(zip(rules, losses, strict=True)):
        # Curves coincide over long stretches: each is thinner than those below it, so that all remain visible.
        colour, width = _COLOURS[i % len(_COLOURS)], 1.4 + 2.0 * (len(rules) - 1 - i)
        drawing.line([(x, 52), (x + 22, 52)], colour, max(width, 2.5))
        drawing.text(x + 28, 52, name, size=13)
        x += 52 + 8.0 * len(name)
        run: list[tuple[float, float]] = []
        for log_aspect, value in zip(logs.tolist(), loss.tolist(), strict=True):
            if np.isnan(value):
                _curve(drawing, run, colour, width)
                run = []
            else:
                run.append((across(log_aspect), down(value)))
        _curve(drawing, run, colour, width)
    return drawing


def _curve(drawing: Drawing, run: list[tuple[float, float]], colour: str, width: float) -> None:
    if len(run) > 1:
        drawing.line(run, colour, width)
