"""The command `kohya-bucket`, imported before the package itself: from here on, Ctrl-C ends it with one line."""

import sys


def main() -> None:
    """Entry point; the commands themselves are in `kohya_bucket.cli`."""
    try:
        from kohya_bucket.cli import main as run

        run()
    except KeyboardInterrupt:
        print("kohya-bucket: interrupted", file=sys.stderr)
        sys.exit(130)
