"""What mkdocs does besides: the explorer is built into the site, and links to files outside docs/ become plain text."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from kohya_bucket.cli.commands import COMMANDS

_LOG = logging.getLogger("mkdocs.plugins.kohya_bucket")
_EXPLORER = "explorer.html"
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the explorer, one HTML file that a command writes."""
    if "explore" not in COMMANDS:
        _LOG.info("%s is left out: this version has no command `explore`", _EXPLORER)
        return files
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, _EXPLORER)
        subprocess.run([sys.executable, "-m", "kohya_bucket", "explore", "--no-open", "--out", str(out)], check=True)
        files.append(File.generated(config, _EXPLORER, content=out.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    if page.file.src_uri == "index.md" and files.get_file_from_path(_EXPLORER):
        markdown += f"\n## Explorer\n\n[Try bucket rules in your browser]({_EXPLORER}).\n"
    return _OUTSIDE.sub(r"\1 (`\2` in the repository)", markdown)
