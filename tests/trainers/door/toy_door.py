"""The toy trainer: what its door and its face have to say, and nothing else; in a folder, the file `trainer.py`."""

import sys
from dataclasses import asdict

import numpy as np

from kohya_bucket.images.listing import list_images
from kohya_bucket.trainers.door.batches import PlannedBatch
from kohya_bucket.trainers.door.config_source import load_source
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.door import TrainerDoor
from kohya_bucket.trainers.door.environment import packages_section
from kohya_bucket.trainers.door.face import Trainer
from kohya_bucket.trainers.door.file_findings import Section
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.door.group import GroupPlanner, epoch_of
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placing import place_images
from kohya_bucket.trainers.door.plan import DatasetPlan, Plan
from kohya_bucket.trainers.door.resume import ResumeHooks
from kohya_bucket.trainers.door.sampler import PlanSampler, arguments_over, with_plan
from kohya_bucket.trainers.door.seams import Seam, SeamGroup
from kohya_bucket.trainers.door.shapes import Takes, Uses
from kohya_bucket.trainers.door.sizes import scan_sizes

PACKAGE = "toys"
MODULE = f"{PACKAGE}.trainer"


def place(pictures, options):
    """A dataset's pictures in this package's buckets."""
    sizes = np.array([picture.size for picture in pictures.pictures], dtype=np.int32)
    times = np.array([picture.times for picture in pictures.pictures], dtype=np.int64)
    keys = DatasetKeys(pictures.resolution, True, 64, 512, 64)
    placing = place_images([p.name for p in pictures.pictures], sizes, times, pictures.batch_size, keys, options)
    pictures.pictures = [p for p, kept in zip(pictures.pictures, placing.placement.placed, strict=True) if kept]
    pictures.placed = placing.trained


def sort_into_buckets(at, self):
    place(self, at.door.options())
    batches = GroupPlanner([self.placed], at.door.options()).planner(1).plan().steps
    self.records = list(range(batches))  # only their number is asked for


def turn_to(at, self, epoch):
    """The order of an epoch follows from its number."""


def group_item(at, self, index, /):
    if not isinstance(index, PlannedBatch):
        return at.original(self, index)
    pictures = self.datasets[index.dataset]
    size = pictures.placed.buckets[index.bucket]
    return pictures.batch_of([pictures.pictures[i] for i in index.images], size)


def make_accelerator(at, args):
    accelerator = at.original(args)
    at.door.resume.watch(accelerator)
    return accelerator


SUBJECTS = (
    SeamGroup(
        "order",
        "the order of an epoch",
        (
            Seam("PictureSet.sort_into_buckets", (Uses("pictures", "records"),), sort_into_buckets),
            Seam("PictureSet.turn_to", (), turn_to),
            Seam("PictureSet.batch_of", (Takes("pictures", "bucket"),)),
            Seam("PictureGroup.__getitem__", (), group_item),
            Seam("Collate.__init__", (Takes("epoch", "group"),)),
        ),
        orders_epochs=True,
    ),
    SeamGroup("resuming", "states are the trainer's own", (Seam("make_accelerator", (), make_accelerator),)),
)


class ToyDoor(TrainerDoor):
    trainer, package = "the toy trainer", PACKAGE

    def home(self):
        module = sys.modules.get(MODULE)
        return module if hasattr(module, "PictureSet") else None

    def subjects(self):
        self.resume = ResumeHooks()
        return SUBJECTS

    def is_group(self, dataset):
        return type(dataset).__name__ in ("PictureGroup", "PictureSet")

    def planned(self, signature, args, kwargs):
        arguments = arguments_over(self.owners.named("PictureGroup"), signature, args, kwargs)
        if not arguments:
            return None
        group, collate = arguments["dataset"], arguments["collate_fn"]
        planner = GroupPlanner([pictures.placed for pictures in group.datasets], self.options())
        sampler = PlanSampler(planner, 0, collate.epoch)
        self.resume.attach(sampler)
        return with_plan(arguments, sampler, self.in_worker)


DOOR = ToyDoor()


def install(*, quiet=False):
    DOOR.open(quiet=quiet, at_once=False)


class Toys(Trainer):
    """Its configs name a folder of images: toys = "images"."""

    name, package, marks = "the toy trainer", PACKAGE, ("../train_toys.py", "trainer.py")
    commands = ("plan", "doctor")

    def door(self):
        return DOOR

    def recognises(self, config, content):
        return isinstance(content, dict) and "toys" in content

    def plan(self, asked, gpus, accumulate, images, tell):
        source, findings = load_source(asked.file, self.name), Findings()
        options = AdapterOptions.of_config(source, findings)
        paths = list_images([source.data["toys"]])
        sizes, once = scan_sizes(paths).sizes, np.ones(len(paths), np.int64)
        placing = place_images(paths, sizes, once, 2, DatasetKeys((256, 256), True, 64, 512, 64), options)
        left_out = [{"path": paths[i], "reason": reason, "mend": {}} for i, reason in placing.left_out]
        if left_out:
            findings.warning("left-out", "", f"{len(left_out)} left out", names=[row["path"] for row in left_out])
        (counts,), rows = epoch_of([placing.trained], options, gpus or [1], accumulate or 1)
        buckets = [asdict(row) | {"bucket": row.bucket.as_tuple()} for row in placing.trained.rows(counts)]
        entry = {"images": len(placing.trained.keys), "buckets": buckets, "not_trained": left_out}
        head = {"config": str(asked.file)}
        return Plan(self.name, findings, head, [DatasetPlan(1, "toys", [], entry)], rows, options)

    def examine(self, asked, tell, quick):
        yield Section("toys", [], self.plan(asked, None, None, False, tell).findings)
        yield packages_section()


TRAINER = Toys()
