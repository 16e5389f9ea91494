"""What mkdocs does in addition.

The explorer and a report are in the site, addresses of pages that were merged lead to where they are now, the names of
the API have their whole docstrings, and links out of docs/ become plain text.
"""

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
_MERGED = {  # the page that holds what had one of its own
    "anima-lora": "ai-toolkit", "bucketsampler": "coming-from", "cluster": "scale", "datasets": "tutorial-loop",
    "diffusers": "coming-from", "epochs": "rules", "families": "configs", "faq": "troubleshooting", "how-to": "look",
    "reliability": "latents", "reported": "troubleshooting", "rules-compared": "rules", "tutorial-gpus": "planning",
    "tutorial-latents": "latents", "tutorial-lora": "sd-scripts", "windows": "gui",
}  # fmt: skip
_REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0; url=../{0}/"><a href="../{0}/index.html">Moved</a>\n'
_TRY = "`kohya-bucket explore`"
_TRY_HERE = "[the explorer](explorer/index.html) (nothing to install)"
_NAME = re.compile(r"^- \*\*`(kohya_bucket\.[\w.]+)`\*\*.*\n", re.MULTILINE)
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
    for old, new in _MERGED.items():
        files.append(File.generated(config, f"{old}/index.html", content=_REDIRECT.format(new)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "index.md":
        markdown = markdown.replace(_TRY, _TRY_HERE)
    if page.file.src_uri == "api.md":
        markdown = _NAME.sub(r"::: \1\n", markdown)
    return _OUTSIDE.sub(r"\1 (`\2` in the repository)", markdown)
