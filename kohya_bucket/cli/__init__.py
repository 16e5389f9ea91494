"""The command line. `main` is all that is imported to begin with: from there on, Ctrl-C ends it with one line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kohya_bucket.extras import importer

if TYPE_CHECKING:
    from kohya_bucket.cli.group import app
else:
    __getattr__ = importer(__name__, {"kohya_bucket.cli.group": ["app"]})

__all__ = ["app", "main"]


def main() -> None:
    """Entry point: a user's mistake ends with one clear line and exit code 2, never with a traceback."""
    try:
        from kohya_bucket.cli.console import say_plainly
        from kohya_bucket.cli.group import run

        say_plainly(sys.stdout, sys.stderr)
        run()
    except KeyboardInterrupt:
        print("kohya-bucket: interrupted", file=sys.stderr)
        sys.exit(130)
