"""`install()` and `uninstall()`: puts the adapter into sd-scripts when, and only when, what orders its epochs is known.

If sd-scripts is imported already it is changed at once, otherwise as soon as the module that defines its data sets is
imported, whichever that is. Calling `install()` again changes nothing.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.adapter.options import TABLE, AdapterOptions, environment_table
from kohya_bucket.adapter.patching import ImportWatch, Patches, StandIn
from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.sdscripts.checkout import SeamError, describe_folder
from kohya_bucket.sdscripts.guard import end_run, guards
from kohya_bucket.sdscripts.home import PACKAGE, home_module

__all__ = ["install", "is_active", "left_alone", "uninstall", "why_inactive"]

_LOADER = "torch.utils.data.dataloader"

logger = logging.getLogger("kohya_bucket")


def _is_of_interest(name: str) -> bool:
    return name == _LOADER or name.startswith(PACKAGE + ".")


class _Door:
    """The adapter's state in this process; what stand-ins ask (`seams.Door`)."""

    def __init__(self) -> None:
        self.owners: Any = None
        self.resume: Any = None
        self.guards, self.patches = Patches(), Patches()
        self.watch = ImportWatch(_is_of_interest, self.proceed)
        self.root: Path | None = None
        self.refusal = ""
        self.unknown: dict[str, Any] = {}
        self.quiet = self.at_once = False
        self.in_worker = install_in_worker
        self._options = AdapterOptions()

    def options(self) -> AdapterOptions:
        return self._options

    def read_options(self, user_config: dict[str, Any]) -> dict[str, Any]:
        table: Mapping[str, Any] | None = user_config.get(TABLE) if isinstance(user_config, dict) else None
        self._take_options(*([("dataset config", table)] if table is not None else []))
        return {key: value for key, value in user_config.items() if key != TABLE} if table is not None else user_config

    def knows(self, subject: str) -> bool:
        return subject not in self.unknown

    def why_inactive(self) -> str:
        """What is wrong, for a run that is about to train; an empty text while the adapter is in place."""
        if self.patches:
            return ""
        if self.refusal:
            return self.refusal
        return "the data sets of sd-scripts are not where a version that this adapter knows has them"

    def proceed(self) -> None:
        """Take the next step that what is imported allows."""
        if not self.guards and hasattr(sys.modules.get(_LOADER), "DataLoader"):
            self.guards.apply(guards(self._planned, self.why_inactive), lambda _: False)
        if self.patches or self.refusal:
            return
        home = home_module()
        if home is not None:
            self._open(home)

    def close(self) -> None:
        self.watch.stop()
        self.patches.take_back()
        self.guards.take_back()
        self.refusal, self.unknown, self._options = "", {}, AdapterOptions()

    def _open(self, home: ModuleType) -> None:
        """Check everything, then replace everything."""
        from accelerate import Accelerator
        from torch.utils.data import DataLoader

        from kohya_bucket.sdscripts.resuming.hooks import ResumeHooks
        from kohya_bucket.sdscripts.seams import SUBJECTS, Owners, Unknown

        self.root = Path(home.__file__ or ".").resolve().parent.parent
        for name in (f"{PACKAGE}.config_util", f"{PACKAGE}.train_util"):  # with them everything else is imported
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
        if self.patches or self.refusal:  # such an import came here by itself
            return
        self.owners = Owners({"Accelerator": Accelerator, "DataLoader": DataLoader})
        found = [Unknown(subject, tuple(subject.problems(self.owners))) for subject in SUBJECTS]
        wrong = [unknown for unknown in found if unknown.problems]
        fatal = [problem for unknown in wrong if unknown.subject.orders_epochs for problem in unknown.problems]
        if fatal:
            self._refuse(fatal)
            return
        self.unknown = {unknown.subject.name: unknown for unknown in wrong}
        self._take_options()
        self.resume = ResumeHooks()
        known = [subject for subject in SUBJECTS if self.knows(subject.name)]
        replaced = [stand_in for subject in known for stand_in in subject.stand_ins(self.owners, self)]
        self.patches.apply(replaced, self._belongs)
        if not self.quiet and is_first_process():
            self._report(sum(len(subject.seams_of(self.owners)) for subject in known), replaced)

    def _refuse(self, problems: list[str]) -> None:
        self.refusal = (
            f"sd-scripts {describe_folder(self.root or Path())} is not a version this adapter knows, so nothing was "
            f"replaced: {'; '.join(problems)}"
        )
        if self.at_once:
            end_run(self.refusal)
        if is_first_process() and not self.quiet:
            logger.warning("%s. A training that is started like this will end before its first step", self.refusal)

    def _belongs(self, module: ModuleType) -> bool:
        """sd-scripts' own modules, its trainers among them, however they were started."""
        if module.__name__.split(".")[0] == PACKAGE or module.__name__ in ("__main__", "__mp_main__"):
            return True
        file = getattr(module, "__file__", None)
        return bool(file) and self.root is not None and str(file).startswith(str(self.root) + os.sep)

    def _report(self, seams: int, replaced: list[StandIn]) -> None:
        lines = [
            f"kohya_bucket in sd-scripts {describe_folder(self.root or Path())}",
            f"{seams} seams checked; replaced:",
        ]
        logger.info("\n".join(lines + [f"  {stand_in.path}" for stand_in in replaced]))
        for unknown in self.unknown.values():
            logger.warning(
                "%s: this version is not known there (%s)", unknown.subject.text, "; ".join(unknown.problems)
            )

    def _planned(self, *call: Any) -> dict[str, Any] | None:
        from kohya_bucket.sdscripts.loader import planned_arguments

        return planned_arguments(self, *call)

    def _take_options(self, *tables: tuple[str, Mapping[str, Any]]) -> None:
        """The environment's file under the given tables."""
        from kohya_bucket.sdscripts.unknown import refuse_what_needs

        with exit_with_message():
            self._options = AdapterOptions.from_tables(*environment_table(), *tables)
            refuse_what_needs(self.unknown, self._options)


def install(*, quiet: bool = False, at_once: bool = False) -> None:
    """Put this package's buckets and plans behind sd-scripts' dataset classes.

    From then on no data set group of sd-scripts reaches a loader without the plan: a run that would train without it
    ends with one line and exit code 2.

    Args:
        quiet: do not list the replaced seams in the log.
        at_once: end the process as soon as sd-scripts turns out to be unknown, not only when it is about to train.

    Raises:
        SeamError: sd-scripts is imported already and is not a version this adapter knows.
    """
    _door.quiet, _door.at_once = quiet, at_once
    _door.watch.start()
    _door.proceed()
    if _door.refusal:
        raise SeamError(f"{_door.refusal}. Update kohya-bucket, or train without it")


def install_in_worker() -> None:
    """Put the adapter into a loader's worker process: a spawned one has imported sd-scripts afresh."""
    install(quiet=True)


_door = _Door()


def uninstall() -> None:
    """Restore everything that `install` replaced. Datasets made in between keep what they were given."""
    _door.close()


def is_active() -> bool:
    """Whether sd-scripts' code is replaced in this process at the moment."""
    return bool(_door.patches)


def why_inactive() -> str:
    """Why a training that began now would not have the adapter; an empty text while it is in place."""
    return _door.why_inactive()


def left_alone() -> dict[str, str]:
    """{subject: why} of what is left to sd-scripts in a version that is known only in part."""
    return {name: "; ".join(unknown.problems) for name, unknown in _door.unknown.items()}
