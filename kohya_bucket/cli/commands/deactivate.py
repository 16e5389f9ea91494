"""`kohya-bucket deactivate`: undoes `kohya-bucket activate`."""

from __future__ import annotations

from kohya_bucket.cli.console import say


def deactivate() -> None:
    """Take away the files that `activate` wrote into this Python's packages."""
    from kohya_bucket.trainers import activation

    folder = activation.site_packages()
    was = activation.activation(folder).active
    activation.deactivate(folder)
    say(f"{'no longer' if was else 'not'} active in {folder}")
