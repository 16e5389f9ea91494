"""Environments in which `kohya-bucket activate` is run.

KOHYA_BUCKET_WHEEL names a built wheel, which is then installed and trained with in place of this checkout.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

LORA_SCRIPTS_NEXT = {
    "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", "ACCELERATE_DISABLE_RICH": "1",
    "NO_COLOR": "1", "FORCE_COLOR": "0", "TERM": "dumb", "PYTHONPATH": "",
}  # fmt: skip
"""What lora-scripts-next (wochenlong) sets for the trainers that it starts, each by the Python of its engine; it takes
PYTHONPATH away, and puts the trainer's own code there for musubi-tuner and ai-toolkit. Source: the launchers in its
`mikazuki/engines`, as of October 2026.
"""


def environment(folder):
    """The Python of a new environment with all packages of this one, and this package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    found = next(folder.rglob("python.exe" if sys.platform == "win32" else "bin/python"))
    packages, wheel = next(folder.rglob("site-packages")), os.environ.get("KOHYA_BUCKET_WHEEL")
    lines = [f"import site; site.addsitedir({path!r})" for path in sys.path if path.endswith("-packages")]
    if wheel:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, wheel]
        subprocess.run(install, check=True)
    else:
        lines.append(str(ROOT))
    (packages / "those_of_this_one.pth").write_text("\n".join(lines), encoding="utf-8")
    return str(found)


def command(python, *arguments):
    words = [python, "-m", "kohya_bucket", *arguments]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", check=False, cwd=Path(python).parent)
    return done.returncode, done.stdout + done.stderr
