"""What `kohya-bucket activate` adds to a start of Python that trains nothing.

    python benchmarks/activated_start.py [--rounds 200]

Two empty environments, one of them activated, are started in pairs, in random order: `python -c pass`, and
`python -c "import asyncio"` as a program that imports a hundred modules.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from origin import commit  # noqa: E402

from kohya_bucket.trainers import activation  # noqa: E402

ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def environment(folder: Path, active: bool) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.rglob("site-packages"))
    if active:
        activation.write(packages)
    return next(path for path in folder.rglob("python*") if path.stem == "python" and path.is_file())


def seconds(python: Path, program: str) -> float:
    began = time.perf_counter()
    subprocess.run([python, "-c", program], check=True, env=ENVIRONMENT)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    lines = [
        "# What an activated environment adds to a start (`benchmarks/activated_start.py`)",
        "",
        "| program | without, ms | activated, ms | difference of the medians, ms |",
        "| --- | ---: | ---: | ---: |",
    ]
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        pythons = [environment(Path(folder, name), name == "active") for name in ("plain", "active")]
        for program in ("pass", "import asyncio"):
            took: list[list[float]] = [[], []]
            for _ in range(rounds + 5):
                for k in order.sample((0, 1), 2):
                    took[k].append(seconds(pythons[k], program))
            plain, active = (statistics.median(times[5:]) * 1e3 for times in took)
            lines.append(f'| `python -c "{program}"` | {plain:.2f} | {active:.2f} | {active - plain:+.2f} |')
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}; commit {commit()}."
    lines += ["", f"{rounds} starts of each, in pairs in random order; {machine}"]
    text = "\n".join(lines) + "\n"
    (REPO / "benchmarks" / "results" / "activated_start.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
