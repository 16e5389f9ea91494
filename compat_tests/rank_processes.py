"""A program on several processes, as torchrun would start them."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(
    command: Sequence[str], ranks: int, out: Path, cwd: str | Path, environment: Mapping[str, str] | None = None
) -> tuple[list[int], list[str]]:
    """(exit codes, what each said): files in `out` take that, since a pipe that nobody reads would stop a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "compat_tests")]), "MASTER_PORT": port,
        "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1", **(environment or {}),
    }  # fmt: skip
    texts, started = [out / f"said{rank}.txt" for rank in range(ranks)], []
    for rank, text in enumerate(texts):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        with text.open("wb") as said:
            started.append(subprocess.Popen(command, env=shared | own, stdout=said, stderr=said, cwd=cwd))
    codes = [process.wait(timeout=500) for process in started]
    return codes, [text.read_text(encoding="utf-8", errors="replace") for text in texts]
