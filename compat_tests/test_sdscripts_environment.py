"""The package in sd-scripts' own environment: no pin moves, and sd-scripts' own tests go on passing."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pinned_names(sd_scripts_dir):
    names = set()
    for line in (sd_scripts_dir / "requirements.txt").read_text(encoding="utf-8").splitlines():
        match = re.match(r"([A-Za-z0-9_.-]+)(\[.*\])?\s*(==.*)?$", line.split("#")[0].strip())
        if match:
            names.add(re.sub(r"[-_.]+", "-", match[1]).lower())
    return names


def test_installing_changes_none_of_the_pins(unpatched, sd_scripts_dir):
    """What pip would install here holds nothing of sd-scripts' requirements, and neither torch nor numpy."""
    report = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--quiet",
            "--report",
            "-",
            "--no-build-isolation",
            str(ROOT),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if report.returncode:
        pytest.skip(f"pip cannot resolve here: {report.stderr.strip()[-300:]}")
    would_install = {item["metadata"]["name"].lower() for item in json.loads(report.stdout)["install"]}
    assert "kohya-bucket" in would_install
    kept = pinned_names(sd_scripts_dir) | {"torch", "numpy", "pillow", "torchvision"}
    present = {name for name in kept if _installed(name)}
    assert {"toml", "rich", "accelerate", "numpy", "torch"} <= present
    assert not would_install & present


def _installed(name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.slow
def test_sd_scripts_own_tests_pass_as_without(unpatched, sd_scripts_dir):
    if not (sd_scripts_dir / "tests").is_dir():
        pytest.skip("this version brings no tests along")

    def outcome(prelude):
        code = f"{prelude}; import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests']))"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=sd_scripts_dir,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return re.sub(r" in .*", "", done.stdout.strip().splitlines()[-1]), done.returncode

    without = outcome("pass")
    assert outcome("import kohya_bucket.trainers.sdscripts as kb; kb.install()") == without
    assert "passed" in without[0]
