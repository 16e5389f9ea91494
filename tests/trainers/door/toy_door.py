"""The toy trainer's door: what a trainer's door has to say, and nothing else."""

import sys

import numpy as np

from kohya_bucket.trainers.door.batches import PlannedBatch
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.door import TrainerDoor
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.door.placing import place_images
from kohya_bucket.trainers.door.resume import ResumeHooks
from kohya_bucket.trainers.door.sampler import PlanSampler, arguments_over, with_plan
from kohya_bucket.trainers.door.seams import Seam, SeamGroup
from kohya_bucket.trainers.door.shapes import Takes, Uses

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
    SeamGroup(
        "resuming",
        "states are the trainer's own",
        (Seam("make_accelerator", (), make_accelerator),),
    ),
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
