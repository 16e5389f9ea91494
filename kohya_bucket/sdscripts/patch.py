"""The permanent door: a marked block in a checkout's `library/__init__.py`.

That file is empty in every release since 0.6.0, is imported before any other module of sd-scripts, and in
spawned loader workers too. The block stays through `git pull`, and trainers that a GUI starts find it.
"""

from __future__ import annotations

from pathlib import Path

from kohya_bucket.adapter import marked_block
from kohya_bucket.adapter.marked_block import BEGIN, END, PatchStatus
from kohya_bucket.sdscripts.checkout import find_checkout

__all__ = ["BLOCK", "patch_install", "patch_remove", "patch_status"]

BLOCK = f"""{BEGIN}
# Written by `kohya-bucket patch install`; `kohya-bucket patch remove` takes it out again.
try:
    import kohya_bucket.sdscripts
except ImportError as missing:
    import os
    import sys

    print(
        f"ERROR: this checkout is patched for kohya_bucket, which cannot be imported ({{missing}}), and would train "
        "WITHOUT it. Install kohya-bucket into this environment, or remove the marked block from " + __file__,
        file=sys.stderr,
    )
    if any(word in os.path.basename(sys.argv[0]) for word in ("train", "fine_tune")):  # the other tools need no plan
        sys.exit(2)
else:
    kohya_bucket.sdscripts.install()
{END}
"""


def patch_status(folder: Path) -> PatchStatus:
    """Whether the block is in the checkout in `folder`, and whether it is the one this version writes."""
    return marked_block.patch_status(_file_of(folder), BLOCK)


def patch_install(folder: Path) -> PatchStatus:
    """Write the block, or renew an older one. What else the file holds stays as it is."""
    return marked_block.patch_install(_file_of(folder), BLOCK)


def patch_remove(folder: Path) -> PatchStatus:
    """Take the block out; the file is then byte for byte what it was."""
    return marked_block.patch_remove(_file_of(folder), BLOCK)


def _file_of(folder: Path) -> Path:
    return find_checkout(folder) / "library" / "__init__.py"
