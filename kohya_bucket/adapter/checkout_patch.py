"""The permanent door of one trainer: a marked block in the first file of its package that is imported.

That file is empty in every release, is imported before any other of the trainer's modules, and in spawned loader
workers too. The block stays through `git pull`, and trainers that a GUI starts find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kohya_bucket.adapter import marked_block
from kohya_bucket.adapter.marked_block import BEGIN, END, PatchStatus
from kohya_bucket.adapter.trial import Trial, try_adapter

__all__ = ["CheckoutPatch"]

_BLOCK = """{begin}
# Written by `kohya-bucket patch install`; `kohya-bucket patch remove` takes it out again.
try:
    import {door}
except ImportError as missing:
    import os
    import sys

    print(
        f"ERROR: this checkout is patched for kohya_bucket, which cannot be imported ({missing}), and would train "
        "WITHOUT it. Install kohya-bucket into this environment, or remove the marked block from " + __file__,
        file=sys.stderr,
    )
    if {trains}:  # the other tools need no plan
        sys.exit(2)
else:
    {door}.install()
{end}
"""


@dataclass(frozen=True)
class CheckoutPatch:
    """One trainer's.

    Attributes:
        trainer: its name, for messages.
        door: the module that opens its door.
        find: the checkout in a folder, or `CheckoutError`.
        file: the file that the block stands in, from the checkout on.
        trains: an expression that says, where the package is missing, whether a trainer was started.
        imports: modules with which everything is imported that the door looks at.
        import_folder: the folder to import them from, from the checkout on.
    """

    trainer: str
    door: str
    find: Callable[[Path], Path]
    file: str
    trains: str
    imports: tuple[str, ...]
    import_folder: str = "."

    @property
    def block(self) -> str:
        """What is written."""
        return _BLOCK.format(begin=BEGIN, end=END, door=self.door, trains=self.trains, missing="{missing}")

    def status(self, folder: Path) -> PatchStatus:
        """Whether the block is in the checkout in `folder`, and whether it is the one this version writes."""
        return marked_block.patch_status(self._file_of(folder), self.block)

    def install(self, folder: Path) -> PatchStatus:
        """Write the block, or renew an older one. What else the file holds stays as it is."""
        return marked_block.patch_install(self._file_of(folder), self.block)

    def remove(self, folder: Path) -> PatchStatus:
        """Take the block out; the file is then byte for byte what it was."""
        return marked_block.patch_remove(self._file_of(folder), self.block)

    def attempt(self, root: Path) -> Trial:
        """Import the checkout at `root` with the adapter, in a process of its own, and write nothing there."""
        return try_adapter(root / self.import_folder, self.door, self.imports)

    def _file_of(self, folder: Path) -> Path:
        return self.find(folder) / self.file
