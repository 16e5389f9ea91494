"""`--for`: the sd-scripts that is to read the npz which a command writes."""

from __future__ import annotations

from pathlib import Path

from kohya_bucket.errors import ConfigError

__all__ = ["FOR_HELP", "version_for"]

FOR_HELP = "npz for this sd-scripts: 0.10.1, 0.11, or its folder; by default the folder one is in, or the newest."


def version_for(given: str) -> str:
    """The version of sd-scripts, as `Architecture.read_by` takes it.

    Args:
        given: a version, or a folder with a checkout; "" for the checkout that the command is run in, if there is one.

    Raises:
        ConfigError: neither a version nor a folder.
        CheckoutError: a folder without a checkout.
    """
    from kohya_bucket.latents.architectures import is_version
    from kohya_bucket.sdscripts.checkout import CheckoutError, find_checkout, npz_version

    if is_version(given):
        return given
    if given and not Path(given).is_dir():
        raise ConfigError(
            f"--for {given!r}: neither a version of sd-scripts, such as 0.10.1 or 0.11, nor a folder with one"
        )
    try:
        return npz_version(find_checkout(Path(given)))
    except CheckoutError:
        if given:
            raise
        return ""
