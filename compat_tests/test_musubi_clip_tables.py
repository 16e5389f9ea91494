"""The table of clips is what the musubi-tuner at hand (MUSUBI_DIR) computes, whatever its version."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def _asked(case):
    return json.dumps({key: value for key, value in case.items() if key not in ("rows", "buckets", "steps")})


@pytest.mark.slow
def test_the_table_is_computed_anew(reference_dir, tmp_path, capsys):
    pytest.importorskip("av")
    source, target = Path(os.environ["MUSUBI_DIR"]).resolve() / "src", tmp_path / "table.json.gz"
    environment = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HERE / "musubi_clips_script.py"), str(target)]
    done = subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, stored = (
        json.loads(gzip.decompress(file.read_bytes())) for file in (target, reference_dir / "musubi_clips.json.gz")
    )
    compared = 0
    for part in ("pictures", "runs"):
        known = {_asked(case): case for case in stored[part]}
        mine = [case for case in theirs[part] if case["architecture"] in stored["names"]]
        assert mine
        for case in mine:
            assert case == known[_asked(case)]
            compared += len(case["rows"])
    assert compared > 3000
    assert theirs["names"].items() >= {k: v for k, v in stored["names"].items() if k in theirs["names"]}.items()
    with capsys.disabled():
        print(f"\n{compared} rows computed anew, {len(theirs['names'])} architectures")
