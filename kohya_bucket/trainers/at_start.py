"""Written by `kohya-bucket activate`; `kohya-bucket activate --off` takes it away.

Python imports this at every start in its environment. It waits for the package of a trainer, and puts kohya_bucket's
plan behind it. Any other program goes on as it would without, no slower: so nothing is imported before.
"""

# ruff: noqa: PTH113, PTH118, PTH120
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

NAME = "_kohya_bucket_at_start"
"""Of this module where it is active."""
ACTIVE = __name__ == NAME and os.environ.get("KOHYA_BUCKET") != "0"
TRAINERS: "Sequence[tuple[str, str, Sequence[str]]]" = ()
"""(package, the folder in `kohya_bucket.trainers`, files by which a trainer's package is told from others of that
name): filled in when this is written."""
_PACKAGES = {package for package, _, _ in TRAINERS}


class AtStart:
    """Asked for every module that is imported, before the finders that find it."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        package, _, rest = name.partition(".")
        if not rest or package not in _PACKAGES or not path:
            return None
        folder = next(iter(path))
        for named, trainer, marks in TRAINERS:
            if package == named and all(os.path.isfile(os.path.join(folder, mark)) for mark in marks):
                sys.meta_path.remove(self)
                self.open(trainer)
                import importlib.util

                return importlib.util.find_spec(name)  # by all finders: the door has one of its own now
        return None

    def open(self, trainer: str) -> None:
        import importlib

        try:
            door = importlib.import_module(f"kohya_bucket.trainers.{trainer}.trainer").TRAINER.door()
            if door.watch not in sys.meta_path:  # else the launcher or the patched checkout was there first
                door.open()
        except Exception as error:
            if getattr(error, "name", "") == "kohya_bucket":
                file = os.path.join(os.path.dirname(__file__), "kohya_bucket.pth")
                text = f"it is activated here and no longer installed: this runs WITHOUT it. Delete {file}"
                print(f"kohya_bucket: {text}", file=sys.stderr)
                return
            text = f"{type(error).__name__}: {error}. KOHYA_BUCKET=0 starts a training without it"
            print(f"kohya_bucket: {' '.join(text.split())}", file=sys.stderr)
            sys.exit(2)


if ACTIVE:
    sys.meta_path.insert(0, AtStart())
