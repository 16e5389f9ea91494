"""A trainer's door: opened when, and only when, all that orders its epochs is known; closed without trace.

A trainer that is imported already is changed at once, otherwise as soon as its home module is imported.

What keeps a run that was started with the adapter from training without it stands in torch's own classes from the
start, whether the trainer is known or not, and whichever of its modules it imports: in `ConcatDataset`, which groups of
data sets are, and in `DataLoader`, which they must go through.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from kohya_bucket.adapter.options import TABLE, AdapterOptions, environment_table
from kohya_bucket.adapter.patching import ImportWatch, Patches, Replacement
from kohya_bucket.adapter.ranks import end_run, exit_with_message, is_first_process
from kohya_bucket.adapter.seams import Owners, Subject

_LOADER = "torch.utils.data.dataloader"

logger = logging.getLogger("kohya_bucket")


class TrainerDoor(ABC):
    """The adapter's state in this process, for one trainer; what replacements ask (`seams.Door`).

    Attributes:
        trainer: its name, for messages.
        package: the package that holds its code.
        owners: what it defines; set once it is imported.
        resume: what takes part in its saved states; set once the door is open.
        refusal: why the door stays shut.
        unknown: {subject: why} of what is left to the trainer.
    """

    trainer: str
    package: str
    advice = (
        "Update kohya-bucket; or train without it: leave out `-m kohya_bucket.launch`, or `kohya-bucket patch remove` "
        "the checkout"
    )
    owners: Owners
    resume: Any = None

    def __init__(self) -> None:
        self.patches = Patches()
        self.watch = ImportWatch(lambda name: name == _LOADER or name.startswith(f"{self.package}."), self.proceed)
        self.root = Path()
        self.refusal = ""
        self.unknown: dict[str, str] = {}
        self.quiet = self.at_once = self._entering = False
        self._options = AdapterOptions()
        self._replaced: dict[str, list[Replacement]] = {}

    # -- what a trainer's own door says -----------------------------------------------------------

    @abstractmethod
    def home(self) -> ModuleType | None:
        """The module that tells this trainer from others; None while it is not imported."""

    @abstractmethod
    def subjects(self) -> Sequence[Subject]:
        """Its seams; asked for when the home is imported."""

    @abstractmethod
    def is_group(self, dataset: Any) -> bool:
        """Whether this is a data set, or group of data sets, that the trainer would train from."""

    @abstractmethod
    def planned(self, signature: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """The arguments of a `DataLoader` call with the plan; None where it is not a trainer's."""

    @property
    def in_worker(self) -> Callable[[], None]:
        """Opens the door in a loader's worker process, by its module's `install`: a spawned one has imported the
        trainer afresh.
        """
        return partial(_install_from, type(self).__module__)

    def complete(self) -> dict[str, Any]:
        """Import what seams are about besides the home; returns classes of other packages by name."""
        return {}

    def check_options(self, options: AdapterOptions) -> None:
        """Raise `ConfigError` for what this version of the trainer cannot do."""
        return

    def describe(self) -> str:
        """The trainer's version and folder."""
        return f"at {self.root}"

    # -- what replacements ask -----------------------------------------------------------------------

    def options(self) -> AdapterOptions:
        return self._options

    def read_options(self, user_config: dict[str, Any]) -> dict[str, Any]:
        table: Mapping[str, Any] | None = user_config.get(TABLE) if isinstance(user_config, dict) else None
        self._take_options(*([("dataset config", table)] if table is not None else []))
        return {key: value for key, value in user_config.items() if key != TABLE} if table is not None else user_config

    def leave(self, subject: Subject, why: str) -> None:
        if subject.orders_epochs:
            self.end(f"{self.trainer} {self.describe()}: {why}")
        self.unknown[subject.name] = why
        self.patches.take_back([replacement.value for replacement in self._replaced.pop(subject.name, [])])
        self._say(subject)
        with exit_with_message():
            self.check_options(self._options)

    def look_at(self, group: Any) -> None:  # noqa: B027  (most trainers need nothing)
        """A data set group was made, with the adapter in place."""

    def why_inactive(self) -> str:
        """Why a training that began now would not have the adapter; an empty text while it is in place."""
        if self.is_active():
            return ""
        return self.refusal or f"{self.trainer} is not where a version that this adapter knows has it"

    def end(self, why: str) -> NoReturn:
        """End a run that would train without the plan."""
        end_run(f"{why}. This run was started with kohya_bucket, so it does not go on without it. {self.advice}")

    # -- opening and closing ----------------------------------------------------------------------

    def open(self, *, quiet: bool, at_once: bool) -> None:
        """Watch for the trainer, or change it now if it is there."""
        self.quiet, self.at_once = quiet, at_once
        self.watch.start()
        self.proceed()

    def is_active(self) -> bool:
        """Whether the trainer's code is replaced in this process at the moment."""
        return bool(self.patches)

    def left_alone(self) -> dict[str, str]:
        """{subject: why} of what is left to the trainer in a version that is known only in part."""
        return dict(self.unknown)

    def close(self) -> None:
        """Restore everything that was replaced. Data sets made in between keep what they were given."""
        self.watch.stop()
        self.patches.take_back()
        watch_no_longer(self)
        self.refusal, self.unknown, self._replaced, self._options = "", {}, {}, AdapterOptions()

    def proceed(self) -> None:
        """Take the next step that what is imported allows."""
        if hasattr(sys.modules.get(_LOADER), "DataLoader"):
            watch(self)
        if not (self.patches or self.refusal or self._entering):
            home = self.home()
            if home is not None:
                self._entering = True  # what it imports comes here too
                try:
                    self._enter(home)
                finally:
                    self._entering = False

    def _enter(self, home: ModuleType) -> None:
        """Check everything, then replace everything."""
        self.root = Path(home.__file__ or ".").resolve().parent.parent
        self.owners = Owners(self.package, home, self.complete())
        subjects = self.subjects()
        wrong = {subject: "; ".join(found) for subject in subjects if (found := subject.problems(self.owners))}
        if fatal := [problems for subject, problems in wrong.items() if subject.orders_epochs]:
            self._refuse(fatal)
            return
        self.unknown = {subject.name: problems for subject, problems in wrong.items()}
        self._take_options()
        known = [subject for subject in subjects if subject.name not in self.unknown]
        self._replaced = {subject.name: subject.replacements(self.owners, self) for subject in known}
        replaced = [replacement for some in self._replaced.values() for replacement in some]
        self.patches.apply(replaced, self._belongs)
        if not self.quiet and is_first_process():
            self._report(sum(len(subject.seams_of(self.owners)) for subject in known), replaced, wrong)

    def _refuse(self, problems: Sequence[str]) -> None:
        self.refusal = (
            f"{self.trainer} {self.describe()} is not a version this adapter knows, so nothing was replaced: "
            f"{'; '.join(problems)}"
        )
        if self.at_once:
            self.end(self.refusal)
        if is_first_process() and not self.quiet:
            logger.warning("%s. A training that is started like this will end before its first step", self.refusal)

    def _report(self, seams: int, replaced: Sequence[Replacement], wrong: Iterable[Subject]) -> None:
        logger.info("kohya_bucket in %s %s: %d seams checked, %d replaced", self.trainer, self.describe(), seams,
                    len(replaced))  # fmt: skip
        logger.debug("\n".join(["replaced:", *(f"  {replacement.path}" for replacement in replaced)]))
        for subject in wrong:
            self._say(subject)

    def _say(self, subject: Subject) -> None:
        logger.warning("%s: this version is not known there (%s)", subject.text, self.unknown[subject.name])

    def _take_options(self, *tables: tuple[str, Mapping[str, Any]]) -> None:
        """The environment's file under the given tables."""
        with exit_with_message():
            self._options = AdapterOptions.from_tables(*environment_table(), *tables)
            self.check_options(self._options)

    def _belongs(self, module: ModuleType) -> bool:
        """The trainer's own modules, its programs among them, however they were started."""
        if module.__name__.split(".")[0] == self.package or module.__name__ in ("__main__", "__mp_main__"):
            return True
        file = getattr(module, "__file__", None)
        return bool(file) and str(file).startswith(str(self.root) + os.sep)


def _install_from(module: str) -> None:
    importlib.import_module(module).install(quiet=True)


_doors: list[TrainerDoor] = []
_patches = Patches()


class Planned:
    """What draws batches from a plan."""


def watch(door: TrainerDoor) -> None:
    """Guard torch's classes for this door too; one replacement serves all doors, in whatever order they are closed."""
    if door not in _doors:
        _doors.append(door)
    if not _patches:
        _patches.apply(_replacements(), lambda _: False)


def watch_no_longer(door: TrainerDoor) -> None:
    """Torch's classes as they were, once no door is left."""
    if door in _doors:
        _doors.remove(door)
    if not _doors:
        _patches.take_back()


def _replacements() -> list[Replacement]:
    from torch.utils.data.dataloader import DataLoader
    from torch.utils.data.dataset import ConcatDataset

    make_loader: Callable[..., None] = DataLoader.__init__
    make_group: Callable[..., None] = ConcatDataset.__init__
    signature = inspect.signature(make_loader)

    @functools.wraps(make_loader)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        for door in _doors_of(kwargs.get("dataset", args[0] if args else None)):
            arguments = None if door.why_inactive() else door.planned(signature, args, kwargs)
            if arguments is not None:
                make_loader(self, **arguments)
                return
            if not _holds_plan(signature, args, kwargs):
                door.end(door.why_inactive() or "no known version of the trainer makes such a loader")
        make_loader(self, *args, **kwargs)

    @functools.wraps(make_group)
    def init_group(self: Any, *args: Any, **kwargs: Any) -> None:
        for door in _doors_of(self):
            if door.why_inactive():
                door.end(door.why_inactive())
        make_group(self, *args, **kwargs)
        for door in _doors_of(self):
            door.look_at(self)

    return [Replacement(DataLoader, "__init__", init_loader), Replacement(ConcatDataset, "__init__", init_group)]


def _doors_of(dataset: Any) -> list[TrainerDoor]:
    return [door for door in _doors if door.is_group(dataset)]


def _holds_plan(signature: inspect.Signature, args: Any, kwargs: Any) -> bool:
    """Whether a loader is made of another one that has the plan, as accelerate does."""
    given = signature.bind_partial(None, *args, **kwargs).arguments
    found = [given.get("sampler"), given.get("batch_sampler")]
    for sampler in found:  # grows while what samplers are made of is looked at
        if isinstance(sampler, Planned):
            return True
        inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
        found += [part for part in inner if part is not None and not any(part is known for known in found)]
    return False
