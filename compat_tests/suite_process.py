"""Runs tests of this folder on a checkout of a trainer, in a process with that checkout's Python, and counts them."""

import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["adapter_report", "run_tests", "states_of_files", "suite_environment"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def suite_environment(checkout: Path) -> dict[str, str]:
    """The variables that the suite is run with: offline, nothing written beside a source."""
    environment = {name: value for name, value in os.environ.items() if name != "KOHYA_BUCKET_CONFIG"}
    return environment | {
        "MUSUBI_DIR" if (checkout / "src" / "musubi_tuner").is_dir() else "SD_SCRIPTS_DIR": str(checkout),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def run_tests(python: Path, checkout: Path, tests: Sequence[str | Path], seconds: float) -> dict[str, Any]:
    """Run test files, at most so long: counts, reasons for skips, one line per failure, kinds of training run."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log.txt"
        command = [str(python), "-m", "pytest", "-m", "", "-p", "no:cacheprovider", f"--junitxml={report}", "-o"]
        command += ["tmp_path_retention_policy=none", f"--basetemp={Path(folder) / 'tests'}", *map(str, tests)]
        began = time.monotonic()
        with log.open("wb") as out:
            status = _wait(command, suite_environment(checkout), out, seconds)
        found = {"passed": 0, "skipped": {}, "failed": [], "runs": {}, "seconds": round(time.monotonic() - began, 1)}
        if report.is_file():
            _count(report, found)
        if status is None:
            found["failed"].append(f"longer than {seconds / 60:g} minutes: stopped")
        elif status not in (0, 1, 5) or (status == 1 and not found["failed"]):
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            found["failed"].append(f"pytest ended with {status}: {lines[-1] if lines else 'nothing said'}")
        return found


def adapter_report(python: Path, checkout: Path) -> dict[str, Any]:
    """What the adapter says about a checkout in its environment: see `adapter_report.py`."""
    done = subprocess.run(
        [str(python), str(HERE / "adapter_report.py")],
        env=suite_environment(checkout),
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=600,
        check=False,
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"refused": said[-1] if said else f"ended with {done.returncode} and said nothing"}


def states_of_files(root: Path) -> dict[str, tuple[int, int]]:
    """(size, modification time) of everything in a checkout but its git and its environments."""
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in (".git", ".venv", "venv")]
        for name in names:
            file = Path(folder) / name
            status = file.lstat()
            found[file.relative_to(root).as_posix()] = (status.st_size, status.st_mtime_ns)
    return found


def _wait(command: list[str], environment: dict[str, str], out: Any, seconds: float) -> int | None:
    """The exit status, or None where the time was up; neither that nor Ctrl-C leaves a process behind."""
    windows = sys.platform == "win32"
    group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if windows else {"start_new_session": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, **group)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            if windows:
                subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True, check=False)
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _count(report: Path, found: dict[str, Any]) -> None:
    skipped, runs = collections.Counter(), collections.Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = [part for part in case if part.tag in ("failure", "error")]
        skip = case.find("skipped")
        if bad:
            said = (bad[0].get("message") or bad[0].text or "").strip().splitlines()
            found["failed"].append(f"{name}: {said[0][:200] if said else bad[0].tag}")
        elif skip is not None:
            skipped[skip.get("message") or "without a reason"] += 1
        else:
            found["passed"] += 1
            runs.update(part.get("value") for part in case.iter("property") if part.get("name") == "training run")
    found["skipped"], found["runs"] = dict(sorted(skipped.items())), dict(sorted(runs.items()))
