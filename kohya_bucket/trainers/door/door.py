"""A trainer's door: opened when, and only when, all that orders its epochs is known; closed without trace.

Its seams are places of the trainer: each says what must be there, and what replaces it. A trainer that is imported
already is changed at once, otherwise as soon as its home module is imported.
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
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.options import TABLE, AdapterOptions, environment_table, placed_by_trainer, rooted
from kohya_bucket.trainers.door.patching import ImportWatch, Patches, Replacement
from kohya_bucket.trainers.door.ranks import end_run, exit_with_message, note_use
from kohya_bucket.trainers.door.seams import Owners, SeamGroup

_LOADER = "torch.utils.data.dataloader"

logger = logging.getLogger("kohya_bucket")


class TrainerDoor(ABC):
    """The adapter's state in this process, for one trainer.

    Attributes:
        trainer: its name, for messages.
        package: the package that holds its code.
        owners: what it defines; set once it is imported.
        resume: what takes part in its saved states; set once the door is open.
        needed: what its version must be, for messages.
        defaults: options whose defaults differ in this trainer.
        refusal: why the door stays shut.
        unknown: {subject: why} of what is left to the trainer.
    """

    trainer: str
    package: str
    needed = ""
    advice = "Update kohya-bucket; or train without it: leave out `-m kohya_bucket.launch`, or set KOHYA_BUCKET=0"
    owners: Owners
    resume: Any = None
    defaults: dict[str, Any] = {}  # noqa: RUF012  (replaced, never changed)

    def __init__(self) -> None:
        self.patches = Patches()
        self.watch = ImportWatch(lambda name: name == _LOADER or name.startswith(f"{self.package}."), self.proceed)
        self.root, self._folders = Path(), tuple[str, ...]()
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
    def subjects(self) -> Sequence[SeamGroup]:
        """Its seams; asked for when the home is imported."""

    @abstractmethod
    def is_group(self, dataset: Any) -> bool:
        """Whether this is a dataset, or group of datasets, that the trainer would train from."""

    @abstractmethod
    def planned(self, signature: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """The arguments of a `DataLoader` call with the plan; None where it is not a trainer's."""

    @property
    def in_worker(self) -> Callable[[], None]:
        """Opens the door in a loader's worker process: a spawned one has imported the trainer afresh."""
        return functools.partial(_open_in, type(self).__module__)

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
        """Those of the config that was read last: it is read after the replacements are in place."""
        return self._options

    def read_options(self, user_config: dict[str, Any], frame: FrameType) -> dict[str, Any]:
        """Take the `[kohya_bucket]` table, and return the config without it.

        `frame` is that of the trainer's function whose `argparse_namespace` names the config's file.
        """
        table: Mapping[str, Any] | None = user_config.get(TABLE) if isinstance(user_config, dict) else None
        name = getattr(frame.f_locals.get("argparse_namespace"), "dataset_config", None) or ""
        table = rooted(table, Path(name).parent)
        self._take_options(*([("dataset config", table)] if table is not None else []))
        return {key: value for key, value in user_config.items() if key != TABLE} if table is not None else user_config

    def leave(self, subject: SeamGroup, why: str) -> None:
        """Leave a subject to the trainer from now on; end the run if it orders epochs."""
        if subject.orders_epochs:
            self.end(f"{self.trainer} {self.describe()}: {why}")
        self.unknown[subject.name] = why
        self.patches.take_back([replacement.value for replacement in self._replaced.pop(subject.name, [])])
        self._say(subject)
        with exit_with_message():
            self.check_options(self._options)

    def look_at(self, group: Any) -> None:  # noqa: B027  (most trainers need nothing)
        """A dataset group was made, with the adapter in place."""

    def why_inactive(self) -> str:
        """Why a training that began now would not have the adapter; an empty text while it is in place."""
        if self.is_active():
            return ""
        return self.refusal or f"{self.trainer} is not where a version that this adapter knows has it"

    def end(self, why: str) -> NoReturn:
        """End a run that would train without the plan."""
        end_run(f"{why}. This run was started with kohya_bucket, so it does not go on without it. {self.advice}")

    # -- opening and closing ----------------------------------------------------------------------

    def open(self, *, quiet: bool = False, at_once: bool = False) -> None:
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
        """Restore everything that was replaced. Datasets made in between keep what they were given."""
        self.watch.stop()
        self.patches.take_back()
        guard_no_longer(self)
        self.refusal, self.unknown, self._replaced, self._options = "", {}, {}, AdapterOptions()

    def proceed(self) -> None:
        """Take the next step that what is imported allows."""
        if hasattr(sys.modules.get(_LOADER), "DataLoader"):
            guard(self)
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
        file = Path(home.__file__ or ".")
        self.root = file.resolve().parent.parent
        # A checkout may be reached by a link, by which its modules then know their files.
        self._folders = tuple(f"{folder}{os.sep}" for folder in (self.root, file.absolute().parent.parent))
        self.owners = Owners(self.package, home, self.complete())
        subjects = self.subjects()
        wrong = {subject: "; ".join(reasons) for subject in subjects if (reasons := subject.problems(self.owners))}
        if fatal := [problems for subject, problems in wrong.items() if subject.orders_epochs]:
            self._refuse(fatal)
            return
        self.unknown = {subject.name: problems for subject, problems in wrong.items()}
        self._take_options()
        whole_subjects = [subject for subject in subjects if subject.name not in self.unknown]
        self._replaced = {subject.name: subject.replacements(self.owners, self) for subject in whole_subjects}
        replaced = [replacement for some in self._replaced.values() for replacement in some]
        self.patches.apply(replaced, self._belongs)
        if not self.quiet and is_first_process():
            self._report(replaced, wrong)

    def _refuse(self, problems: Sequence[str]) -> None:
        self.refusal = (
            f"{self.trainer} {self.describe()} is not a version this adapter knows{self.needed}, so nothing was "
            f"replaced: {'; '.join(problems)}"
        )
        if self.at_once:
            self.end(self.refusal)
        if is_first_process() and not self.quiet:
            logger.warning("%s. A training that is started like this will end before its first step", self.refusal)

    def _report(self, replaced: Sequence[Replacement], wrong: Iterable[SeamGroup]) -> None:
        logger.info("kohya_bucket in %s %s is active", self.trainer, self.describe())
        logger.debug("replaced: %s", ", ".join(f"{getattr(r.owner, '__name__', r.owner)}.{r.name}" for r in replaced))
        for subject in wrong:
            self._say(subject)

    def _say(self, subject: SeamGroup) -> None:
        logger.warning("%s: this version is not known there (%s)", subject.text, self.unknown[subject.name])

    def refuse_placed(self, options: AdapterOptions, cached: str = "") -> None:
        """Raise `ConfigError` for the first of `placed_by_trainer`."""
        for conflict in placed_by_trainer(options, self.trainer, cached):
            raise ConfigError(conflict)

    def _take_options(self, *tables: tuple[str, Mapping[str, Any]]) -> None:
        """The environment's file under the given tables."""
        defaults = ("defaults", self.defaults)
        with exit_with_message():
            self._options = AdapterOptions.from_tables(defaults, *environment_table(), *tables)
            self.check_options(self._options)

    def _belongs(self, module: ModuleType) -> bool:
        """The trainer's own modules, its programs among them, however they were started."""
        if module.__name__.split(".")[0] == self.package or module.__name__ in ("__main__", "__mp_main__"):
            return True
        return str(getattr(module, "__file__", None) or "").startswith(self._folders)


def _open_in(module: str) -> None:
    importlib.import_module(module).DOOR.open(quiet=True)


# What keeps a run that was started with the adapter from training without it stands in torch's own classes from the
# start, whether the trainer is known or not, and whichever of its modules it imports: in `ConcatDataset`, which groups
# of datasets are, and in `DataLoader`, which they must go through.


class Planned:
    """What draws batches from a plan."""


_doors: list[TrainerDoor] = []
_guards = Patches()


def guard(door: TrainerDoor) -> None:
    """Guard torch's classes for this door too; one replacement serves all doors, in whatever order they are closed."""
    if door not in _doors:
        _doors.append(door)
    if not _guards:
        _guards.apply(_replacements(), lambda _: False)


def guard_no_longer(door: TrainerDoor) -> None:
    """Torch's classes as they were, once no door is left."""
    if door in _doors:
        _doors.remove(door)
    if not _doors:
        _guards.take_back()


def _replacements() -> list[Replacement]:
    from torch.utils.data.dataloader import DataLoader
    from torch.utils.data.dataset import ConcatDataset

    make_loader: Callable[..., None] = DataLoader.__init__
    make_group: Callable[..., None] = ConcatDataset.__init__
    signature = inspect.signature(make_loader)

    @functools.wraps(make_loader)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        for door in _doors_of(kwargs.get("dataset", args[0] if args else None)):
            with exit_with_message():
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
            note_use()
            door.look_at(self)

    return [Replacement(DataLoader, "__init__", init_loader), Replacement(ConcatDataset, "__init__", init_group)]


def _doors_of(dataset: Any) -> list[TrainerDoor]:
    return [door for door in _doors if door.is_group(dataset)]


def _holds_plan(signature: inspect.Signature, args: Any, kwargs: Any) -> bool:
    """Whether a loader is made of another one that has the plan, as accelerate does."""
    arguments = signature.bind_partial(None, *args, **kwargs).arguments
    samplers = [arguments.get("sampler"), arguments.get("batch_sampler")]
    for sampler in samplers:  # grows while what samplers are made of is looked at
        if isinstance(sampler, Planned):
            return True
        inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
        samplers += [part for part in inner if part is not None and not any(part is seen for seen in samplers)]
    return False
