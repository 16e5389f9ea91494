"""How long a command takes to start: from the call to its help, or to a small answer.

    python benchmarks/cli_start.py [--against CHECKOUT] [--rounds 15] [--command "simulate --help"]

Each run is a process of its own, with byte code kept from one run that is not counted. `--against` names another
checkout of this project, e.g. of an earlier commit (`git worktree add ../before COMMIT`): its commands are run in turn
with those of this one, and the ratio is taken pair by pair. The floor is a program with one option, written with the
same command line library: its `--help` for help, its answer for the rest.

CPU seconds (user and system) are shown too where the system counts them (not on Windows): on a machine that does other
work, they vary less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

FLOOR = """
import typer
app = typer.Typer(add_completion=False)
@app.command()
def one(side: int = typer.Option(3, help="A side.")) -> None:
    '''Print a side.'''
    print(side)
app()
"""
WORK = (("--version",), ("simulate", "576x768"), ("buckets", "chart"), ("plan", "configs/demo.toml"))


def once(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of one run."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} in {folder}: {done.stderr.decode(errors='replace')}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu


def row(name: str, contestants: list[tuple[list[str], Path]], rounds: int, environment: dict[str, str]) -> list[str]:
    """Medians of all contestants, which take turns, and of the first's ratio to each other one."""
    for command, folder in contestants:
        once(command, folder, environment)
    runs = [[once(command, folder, environment) for command, folder in contestants] for _ in range(rounds)]
    cells = [f"`{name}`"]
    for k in range(len(contestants)):
        wall, cpu = (statistics.median(run[k][figure] for run in runs) for figure in (0, 1))
        cells += [f"{wall:.2f}", f"{cpu:.2f}" if cpu else "-"]
    for k in range(1, len(contestants)):
        ratios = [run[0][figure] / run[k][figure] for run in runs for figure in (1 if run[k][1] else 0,)]
        cells.append(f"{statistics.median(ratios):.2f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--command", action="append", help="only this one; several times for several")
    asked = parser.parse_args()
    from kohya_bucket.cli.commands import COMMANDS

    commands = [("--help",), *((name, "--help") for name in COMMANDS), *WORK]
    if asked.command:
        commands = [tuple(text.split()) for text in asked.command]
    peers = ["floor", *(["before"] if asked.against else [])]
    head = ["command", *(f"{who}, s{of}" for who in ("here", *peers) for of in ("", " of CPU"))]
    lines = [[*head, *(f"CPU, here / {who}" for who in peers)], ["---", *["---:"] * (len(head) - 1 + len(peers))]]
    with tempfile.TemporaryDirectory() as byte_code:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
        environment |= {"PYTHONPYCACHEPREFIX": byte_code, "COLUMNS": "100"}
        for command in commands:
            own = [sys.executable, "-m", "kohya_bucket", *command]
            floor = [sys.executable, "-c", FLOOR, *(["--help"] if command[-1] == "--help" else [])]
            others = [(own, asked.against.resolve())] if asked.against else []
            contestants = [(own, REPO), (floor, REPO), *others]
            lines.append(row(" ".join(command), contestants, asked.rounds, environment))
            print(*lines[-1], flush=True)
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    before = '"before" is the checkout given by --against. ' if asked.against else ""
    note = (
        f'Medians of {asked.rounds} rounds, one process per run. "floor" is a program with one command and one option, '
        f"using the same library. {before}{os.cpu_count()} cores, Python {sys.version.split()[0]}."
    )
    text = f"# Start of a command\n\n{table}\n\n{note}\n"
    (REPO / "benchmarks" / "results" / "cli_start.md").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
