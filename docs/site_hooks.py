"""What mkdocs does in addition: the explorer and a report are in the site, and links out of docs/ become plain text."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_PAGES = {  # pages that commands write, by where they are in the site
    "explorer": ("explore", "--no-open", "--out"),
    "report": ("analyze", "configs/demo_images", "--quiet", "--hash", "--batch-size", "4", "--html"),
}
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the explorer and a report of the demo data, each one HTML file that a command writes."""
    with tempfile.TemporaryDirectory() as folder:
        for name, command in _PAGES.items():
            out = Path(folder, f"{name}.html")
            root = Path(config.config_file_path).parent
            words = [sys.executable, "-m", "kohya_bucket", *command, str(out)]
            subprocess.run(words, check=True, cwd=root, stdout=subprocess.DEVNULL)
            files.append(File.generated(config, f"{name}/index.html", content=out.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "index.md":
        markdown += (
            "\n## In your browser\n\n[The explorer](explorer/index.html): bucket rules, and pictures that you drop. "
            "[A report](report/index.html) of the demo data.\n"
        )
    return _OUTSIDE.sub(r"\1 (`\2` in the repository)", markdown)
