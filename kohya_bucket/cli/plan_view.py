"""What `plan` shows of a dataset config of any trainer: one plan as tables for a reader, or as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console

from kohya_bucket.cli.console import STYLES, print_table, say, say_first, wide_console
from kohya_bucket.texts import counted
from kohya_bucket.trainers.door.findings import Findings, Severity
from kohya_bucket.trainers.door.group import GpuRow
from kohya_bucket.trainers.door.plan import DatasetPlan, Plan

_LEGEND = (
    "not full: batches with fewer images than the batch size; cut and worst: what is cropped off, on average and at "
    "most; idle: time in which GPUs wait for one another"
)
_RULED: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}


def show(plan: Plan, images: bool, as_json: bool) -> None:
    """Print a plan, with `images` also each image and all names that findings are about."""
    if as_json:
        typer.echo(json.dumps(plan.as_dict(images), indent=2))
        return
    console = wide_console()
    for data in plan.datasets:
        _print_data(console, data, images)
    if plan.gpus:
        _print_gpus(console, plan.gpus, plan.accumulate)
    if plan.length is not None:
        for row in (row for row in plan.gpus if row.epochs == plan.gpus[0].epochs):  # all epochs are equally long
            where = f"on {counted(row.gpus, 'GPU')}: " if len(plan.gpus) > 1 else ""
            say(where + plan.length.text(row.updates, "update" if plan.accumulate > 1 else "step"))
    if len(plan.findings):
        console.print()
        _print_findings(console, plan.findings, plan.trainer, images)
    if plan.unplanned:
        what = "dataset" if len(plan.unplanned) == 1 else "datasets"
        say(f"not planned, because of that: {what} {', '.join(map(str, plan.unplanned))}")


def _print_data(console: Console, data: DatasetPlan, images: bool) -> None:
    console.print()
    console.print(f"Dataset {data.number}", style="bold", end="")
    console.print(f": {data.title}", soft_wrap=True)
    for line in data.above:
        console.print(f"  {line}", soft_wrap=True)
    _print_buckets(console, data.entry)
    for line in data.below:
        console.print(line, soft_wrap=True)
    if left_out := data.entry["not_trained"]:
        console.print(f"not trained: {len(left_out):,}", style="yellow")
        lines = [f"{row.get('image') or row['path']}: {row['reason']}" for row in left_out]
        say_first(lines, len(lines) if images else 20, " (--images lists all)")
    if any("cut" in row for row in data.rows[:1]):
        console.print(
            f"{'size':>11} {'bucket':>10} {'resized':>11} {'cut left,top,right,bottom':>26} {'crop':>6}  image"
        )
    for row in data.rows:
        console.print(_row_line(row), soft_wrap=True)


def size_text(size: Sequence[int]) -> str:
    """`1024x768`, of clips `1024x768x17`; one number is of images of any size."""
    return f"{size[0]} images" if len(size) == 1 else "x".join(map(str, size))


def _row_line(row: Mapping[str, Any]) -> str:
    bucket, loss = f"{size_text(row['bucket']):>10}", f"{row['crop_loss']:>6.1%}"
    if "cut" in row:
        cut = ",".join(map(str, row["cut"]))
        return f"{size_text(row['size']):>11} {bucket} {size_text(row['resized']):>11} {cut:>26} {loss}  {row['key']}"
    if "items" not in row:
        return f"{bucket} {loss}  {row['path']}"
    lost = "" if row["seconds_lost"] is None else f" {row['seconds_lost']:.2f} s"
    items = counted(len(row["items"]), "item")
    kept = f"{row['frames']:>5} frames, {row['dropped']:>4} in no item{lost:>9}, {items:>9}"
    return f"{bucket} {loss} {kept}  {row['path']}"


def _print_buckets(console: Console, entry: Mapping[str, Any]) -> None:
    rows, what = entry["buckets"], "images" if "images" in entry else "items"
    if not rows:
        console.print("nothing is trained")
        return
    sums = what, "samples", "batches", "short_batches", "enlarged"
    total = {name: sum(row[name] for row in rows) for name in sums if name in rows[0]}
    most = "worst_crop_loss", "largest_enlargement"
    total |= {name: max(row[name] for row in rows) for name in most if name in rows[0]}
    total["mean_crop_loss"] = sum(row["mean_crop_loss"] * row[what] for row in rows) / total[what]
    cells = [_bucket_cells(row, what) for row in (*rows, {**total, what: entry[what], "bucket": f"all {len(rows)}"})]
    console.print()
    print_table(console, cells, left=0, spare=("aspect", "not full", "samples", "batches"), total=True, **_RULED)


def _bucket_cells(row: Mapping[str, Any], what: str) -> dict[str, str]:
    size = row["bucket"]
    of_all = isinstance(size, str)
    name = size if of_all else " + ".join(map(size_text, (size, *row.get("controls", ()))))
    cells = {"bucket": name, "aspect": "" if of_all else f"{size[0] / size[1]:.3f}"}
    cells |= {name: f"{row[name]:,}" for name in (what, "samples", "batches")}
    cells["not full"] = f"{row['short_batches']:,}" if row["short_batches"] else ""
    cells |= {"cut": f"{row['mean_crop_loss']:.1%}", "worst": f"{row['worst_crop_loss']:.1%}"}
    if "enlarged" in row:
        up = row["enlarged"]
        cells["enlarged\n(up to)"] = f"{up:,} ({row['largest_enlargement']:.3g}x)" if up else ""
    return cells


def _print_gpus(console: Console, rows: Sequence[GpuRow], accumulate: int) -> None:
    """The epoch on each number of GPUs, beside what the trainer would do alone."""
    console.print()
    console.print("An epoch", style="bold", end="")
    console.print(f", {accumulate} batches per update" if accumulate > 1 else "")
    cells = []
    for row in rows:
        line = {"epochs": row.epochs} if row.epochs else {}
        line |= {"GPUs": f"{row.gpus}", "steps": f"{row.steps:,}"}
        line |= {"updates": f"{row.updates:,}"} if accumulate > 1 else {}
        line |= {name: f"{getattr(row, name):,}" for name in ("samples", "missed", "repeated")}
        cells.append(line | {"idle": f"{row.idle:.1%}", "idle without kohya_bucket": f"{row.idle_independent:.1%}"})
    console.print()
    print_table(console, cells, left=0, spare=("samples",), **_RULED)
    console.print(_LEGEND, style="dim", soft_wrap=True)
    if all(row.gpus != 1 for row in rows):
        console.print("samples and batches of the buckets above are those of one GPU", style="dim", soft_wrap=True)
    if largest := dict.fromkeys(row.largest for row in rows if row.largest):
        console.print(f"the batch that needs most memory: {'; '.join(largest)}", style="dim", soft_wrap=True)
    changes = ", ".join(f"{counted(row.shape_changes, 'time')} on {counted(row.gpus, 'GPU')}" for row in rows)
    console.print(f"a batch has another shape than the one before: {changes}", style="dim", soft_wrap=True)
    lines: dict[str, None] = {}
    for row in rows:
        ledger = row.ledger if row.missed or row.repeated or row.moved else ""
        lines |= {f"{counted(row.gpus, 'GPU')}: {text}": None for text in (ledger, row.left_over) if text}
    for text in lines:
        console.print(text, soft_wrap=True)


def _print_findings(console: Console, findings: Findings, trainer: str, names: bool) -> None:
    """The findings, and below them what stops the trainer; with `names` all that each is about."""
    for finding in sorted(findings, key=lambda finding: finding.severity is Severity.ERROR):
        stops = finding.severity is Severity.ERROR
        who = "kohya_bucket" if finding.code == "settings" else trainer
        title = f"{who} stops" if stops else finding.severity.value
        console.print(f"{title}: ", style=STYLES[finding.severity.value], end="")
        console.print(finding.text, soft_wrap=True)
        # The text names the first few.
        for name in finding.names if names and len(finding.names) > 3 else ():
            console.print(f"    {name}", soft_wrap=True)
