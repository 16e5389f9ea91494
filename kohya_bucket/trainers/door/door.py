"""A trainer's door: opened when, and only when, all that orders its epochs is known; closed without trace.

Its seams are places of the trainer: each says what must be there, and what replaces it. A trainer that is imported
already is changed at once, otherwise as soon as its home module is imported.

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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn

from kohya_bucket.trainers.door.options import TABLE, AdapterOptions, environment_table, rooted
from kohya_bucket.trainers.door.patching import ImportWatch, Patches, Replacement
from kohya_bucket.trainers.door.ranks import end_run, exit_with_message, is_first_process, note_use
from kohya_bucket.trainers.door.shapes import (
    Behaves,
    Check,
    bounds_of_class,
    bounds_of_function,
    by_name,
    signature_of,
    takes_all,
)

_LOADER = "torch.utils.data.dataloader"

logger = logging.getLogger("kohya_bucket")


class TrainerDoor(ABC):
    """The adapter's state in this process, for one trainer.

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
    def subjects(self) -> Sequence[SeamGroup]:
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

    def _report(self, seams: int, replaced: Sequence[Replacement], wrong: Iterable[SeamGroup]) -> None:
        logger.info("kohya_bucket in %s %s: %d seams checked, %d replaced", self.trainer, self.describe(), seams,
                    len(replaced))  # fmt: skip
        logger.debug("replaced: %s", ", ".join(f"{getattr(r.owner, '__name__', r.owner)}.{r.name}" for r in replaced))
        for subject in wrong:
            self._say(subject)

    def _say(self, subject: SeamGroup) -> None:
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
            note_use()
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


_MISSING = object()


class Replaced(NamedTuple):
    """Where a replacement stands, its first argument: what was there, and the door that replaced it."""

    original: Any
    door: TrainerDoor


@dataclass(frozen=True)
class Seam:
    """One place.

    What a replacement must take follows from its own signature. It is never given what it does not take: parameters
    that only the original has, with a default, are passed on if the replacement ends in `**more`; otherwise a call that
    gives one another value leaves the subject to the trainer. A `KohyaBucketError` in it ends the run with one line.

    Attributes:
        path: a class, function or member of a class, by the name that the trainer gives it.
        checks: what must hold there.
        replacement: a class, or a function of a `Replaced` and of the original's arguments; None if the original stays.
        only: all parameters whose values have no consequences that the adapter does not know; none: any.
        defaults: class of the trainer that has defaults of parameters that have none in the signature.
        when: whether a checkout has it, where only some versions do.
    """

    path: str
    checks: tuple[Check, ...] = ()
    replacement: Any = None
    only: tuple[str, ...] = ()
    defaults: str = ""
    when: Callable[[Owners], bool] = lambda _: True

    @property
    def _signature(self) -> inspect.Signature:
        """What the replacement takes of the trainer."""
        signature = inspect.signature(self.replacement or _pass_on)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def problem(self, value: Any) -> str:
        """What is wrong with what was found, or an empty text."""
        if inspect.isclass(self.replacement):
            found = [bounds_of_class(self.replacement, value)]
        else:
            found = [bounds_of_function(self._signature, value)] if self.replaces else []
        for check in sorted(self.checks, key=lambda check: isinstance(check, Behaves)):
            if not (isinstance(check, Behaves) and any(found)):  # what looks otherwise is not called
                found.append(check(value))
        return ", ".join(filter(None, found))

    @property
    def replaces(self) -> bool:
        """Whether something else is put there."""
        return self.replacement is not None or bool(self.only)

    def replaced(self, original: Any, door: TrainerDoor, subject: SeamGroup) -> Any:
        """What is put there."""
        if inspect.isclass(self.replacement):
            return self.replacement
        place, replacement, takes = Replaced(original, door), self.replacement or _pass_on, self._signature
        theirs, named = signature_of(original).parameters, by_name(takes, signature_of(original))
        first = [name for name, one in named.items() if one.kind is one.POSITIONAL_ONLY]
        known = {"self", *(self.only or named)}
        forwards = any(one.kind is one.VAR_KEYWORD for one in named.values())

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            with exit_with_message():
                return replacement(place, *args, **kwargs)

        @functools.wraps(original)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = _given(signature_of(original), args, kwargs)
            more = {} if forwards and not self.only else {name: given[name] for name in given if name not in known}
            if said := self._unheeded(more, theirs, door):
                door.leave(subject, said)
                return original(*args, **kwargs)
            if takes_all(takes):
                return replaced(*args, **kwargs)
            rest = {name: given[name] for name in given if name not in (*first, *more)}
            return replaced(*(given[name] for name in first), **rest)

        return replaced if theirs.keys() <= known or (takes_all(takes) and not self.only) else bounded

    def _unheeded(self, given: dict[str, Any], theirs: Mapping[str, inspect.Parameter], door: TrainerDoor) -> str:
        """Which of some arguments has another value than its default, in words."""
        implied = door.owners.named(self.defaults) if self.defaults else None
        for name, value in given.items():
            default = theirs[name].default if name in theirs else inspect.Parameter.empty
            default = getattr(implied, name, default)
            if value is not default and (
                type(value) is not type(default) or hasattr(value, "shape") or value != default
            ):
                return f"{self.path} is given {name} = {value!r}, which this adapter does not know"
        return ""


def _pass_on(place: Replaced, *args: Any, **kwargs: Any) -> Any:
    return place.original(*args, **kwargs)


def _given(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    more = [name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
    return {**given, **given.pop(more[0], {})} if more else given


def where(condition: Callable[[Owners], bool], *seams: Seam) -> tuple[Seam, ...]:
    """Seams that only some versions have."""
    return tuple(replace(seam, when=condition) for seam in seams)


def calling_frame() -> FrameType:
    """Of the trainer's code that called the replacement which asks."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


@dataclass(frozen=True)
class SeamGroup:
    """Seams that stand or fall together.

    Attributes:
        name: short, for programs.
        text: what the trainer does itself if this is left to it.
        seams: those of all versions.
        orders_epochs: without it there is no adapter.
    """

    name: str
    text: str
    seams: tuple[Seam, ...]
    orders_epochs: bool = False

    def seams_of(self, owners: Owners) -> tuple[Seam, ...]:
        """The seams in a checkout."""
        return tuple(seam for seam in self.seams if seam.when(owners))

    def problems(self, owners: Owners) -> list[str]:
        """What is missing or different, by seam."""
        return [f"{seam.path} {problem}" for seam in self.seams_of(owners) if (problem := owners.problem(seam))]

    def replacements(self, owners: Owners, door: TrainerDoor) -> list[Replacement]:
        """What is to be put in place; call only where there are no problems."""
        out = []
        for seam in self.seams_of(owners):
            if seam.replaces:
                owner, name, value = owners.find(seam.path)
                out.append(Replacement(owner, name, seam.replaced(value, door, self)))
        return out


@dataclass
class Owners:
    """Finds what a trainer defines, wherever a version defines it.

    Args:
        package: the package that holds its code.
        home: its main module, whose names come first where modules disagree.
        foreign: classes of other packages that seams are about, by name.
    """

    package: str
    home: ModuleType
    foreign: dict[str, Any] = field(default_factory=dict)

    def find(self, path: str) -> tuple[Any, str, Any]:
        """(owner, name, value) of a path; the value is `_MISSING` where there is nothing."""
        first, *rest = path.split(".")
        value = self.named(first)
        owner: Any = sys.modules.get(getattr(value, "__module__", ""))
        name = getattr(value, "__name__", first)
        for part in rest:
            if value is _MISSING:
                break
            # as it stands there: a static method is one, and not yet the function
            owner, name, value = value, part, inspect.getattr_static(value, part, _MISSING)
        return owner, name, value

    def named(self, name: str) -> Any:
        """A class, function or value that some module of the trainer has."""
        if name in self.foreign:
            return self.foreign[name]
        return next((vars(module)[name] for module in self._modules() if name in vars(module)), _MISSING)

    def has(self, path: str) -> bool:
        """Whether there is such a thing, whatever it looks like."""
        return self.find(path)[2] is not _MISSING

    def problem(self, seam: Seam) -> str:
        """What is wrong at a seam, or an empty text."""
        value = self.find(seam.path)[2]
        return "does not exist" if value is _MISSING else seam.problem(value)

    def _modules(self) -> Iterable[ModuleType]:
        """The trainer's modules, its home first."""
        yield self.home
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{self.package}.") and isinstance(module, ModuleType) and module is not self.home:
                yield module
