"""A trainer in small, with the habits of real ones: its own dataset, its own batch records, shuffled by hand."""

import math
import random
from multiprocessing import Value
from types import SimpleNamespace

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, get_worker_info


class Picture:
    def __init__(self, name, size, times=1):
        self.name, self.size, self.times = name, size, times
        self.bucket = None


class Record:
    """One batch: which of a bucket's pictures."""

    def __init__(self, bucket, begin, end):
        self.bucket, self.begin, self.end = bucket, begin, end


class PictureSet(Dataset):
    def __init__(self, pictures, batch_size, resolution=(256, 256)):
        self.pictures, self.batch_size, self.resolution = pictures, batch_size, resolution
        self.records, self.shelves = [], {}

    def sort_into_buckets(self):
        for picture in self.pictures:
            wide = picture.size[0] > picture.size[1]
            picture.bucket = (320, 192) if wide else (192, 320)
            self.shelves.setdefault(picture.bucket, []).extend([picture] * picture.times)
        for bucket, shelf in self.shelves.items():
            for k in range(math.ceil(len(shelf) / self.batch_size)):
                self.records.append(Record(bucket, k * self.batch_size, (k + 1) * self.batch_size))
        self.turn_to(0)

    def turn_to(self, epoch):
        random.seed(epoch)
        random.shuffle(self.records)
        for shelf in self.shelves.values():
            random.shuffle(shelf)

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        record = self.records[index]
        return self.batch_of(self.shelves[record.bucket][record.begin : record.end], record.bucket)

    def batch_of(self, pictures, bucket):
        pixels = torch.zeros(len(pictures), 3, bucket[1] // 8, bucket[0] // 8)
        return {"names": [picture.name for picture in pictures], "pixels": pixels}


class PictureGroup(ConcatDataset):
    def turn_to(self, epoch):
        for pictures in self.datasets:
            pictures.turn_to(epoch)


class Collate:
    def __init__(self, epoch, group):
        self.epoch, self.group = epoch, group

    def __call__(self, items):
        info = get_worker_info()
        (self.group if info is None else info.dataset).turn_to(self.epoch.value)  # late, as real ones are
        return items[0]


def make_accelerator(args):
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def train(args):
    """Trains `args.sets` for `args.epochs`; returns (epoch, names, shape) of each step of this process."""
    accelerator = make_accelerator(SimpleNamespace(**vars(args)))
    for pictures in args.sets:
        pictures.sort_into_buckets()
    group, epoch = PictureGroup(args.sets), Value("i", 0)
    loader = DataLoader(group, batch_size=1, shuffle=True, collate_fn=Collate(epoch, group), num_workers=args.workers)
    loader = accelerator.prepare(loader)
    if args.resume:
        accelerator.load_state(args.resume)
    seen = []
    for number in range(args.epochs):
        epoch.value = number + 1
        for batch in loader:
            accelerator.step += 1
            seen.append((number, batch["names"], tuple(batch["pixels"].shape[2:])))
            if len(seen) == args.stop:
                accelerator.save_state(args.state)
                return seen
        accelerator.step = 0
    return seen
