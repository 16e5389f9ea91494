"""`BucketedLatentDataset`: a store of latents, and of the outputs of text encoders, as a torch dataset."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from kohya_bucket.buckets.bucket import Bucket, BucketSet, distinct_sizes
from kohya_bucket.checks import as_flag, refuse_other
from kohya_bucket.datasets.agreement import world
from kohya_bucket.datasets.items import Item, register_bucket_collation
from kohya_bucket.datasets.planned_index import bucket_of, item_number
from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.latents.fingerprint import UNKNOWN_VAE
from kohya_bucket.latents.items import TEXT_FOLDER, Caption
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.entries import SIDES, WITHOUT_MASKS
from kohya_bucket.latents.store.exact_arrays import unpack
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.options import is_number


def _scale(latents: torch.Tensor, space: LatentSpace, scaled: bool) -> torch.Tensor:
    """From what the shard holds to what is asked for, in single precision; `latents` of a posterior are raw."""
    if space.values == ("scaled" if scaled else "raw") or (space.scale_factor == 1 and space.shift_factor == 0):
        return latents
    if scaled:
        return (latents.float() - space.shift_factor) * space.scale_factor
    return latents.float() / space.scale_factor + space.shift_factor


_HOW = "`kohya-bucket precompute --text` puts them there"


def _rows_of_captions(store: LatentStore, family: str, texts: Sequence[str | None]) -> npt.NDArray[np.int64]:
    """[N] where a store has the outputs of captions; None stands for the empty one.

    Raises:
        LatentStoreError: it does not have those of all.
    """
    captions = [text or "" for text in texts]
    keys = {text: Caption(text).key for text in set(captions)}
    rows = store.find([keys[caption] for caption in captions], family)
    if (rows < 0).any():
        first = captions[int(np.flatnonzero(rows < 0)[0])]
        raise LatentStoreError(
            f"{store.layout.root} has no outputs of {family} for {int((rows < 0).sum())} of {len(captions)} captions, "
            f"the first of them {first[:80]!r}; it holds those of {store.collections()}: {_HOW}"
        )
    return rows


def _outputs_at(store: LatentStore, row: int) -> dict[str, torch.Tensor]:
    """The outputs of a caption by name, each as a tensor of the type that its encoder gave."""
    outputs = {}
    for name, packed in store.packed(row).items():
        if packed.storage == "bfloat16":
            bits = unpack(replace(packed, storage="bits", numpy_type="<i2", bits=packed.bits.view(np.int16)))
            outputs[name] = torch.from_numpy(bits).view(torch.bfloat16)
        else:
            outputs[name] = torch.from_numpy(unpack(packed))
    return outputs


def _probability(value: Any) -> str:
    return "" if is_number(value) and 0 <= value <= 1 else "a probability, from 0 to 1"


class BucketedLatentDataset(Dataset[dict[str, Any]]):
    """Latents that `precompute` stored. Use with `BucketBatchSampler` and a plain `DataLoader`.

    Item i is a dict: `latents` [C, H/8, W/8] in the stored type; `bucket` (`Bucket`); `bucket_idx`; `path` (the
    image as the store names it); `original_size` [2] int64 (width, height); `crop_ltrb` [4] float32, of a mirrored
    image the mirrored crop; `caption` where any was stored, "" for images without; `text_outputs`, tensors by name,
    where asked for; `alpha_mask` [H, W] float32 in 0..1 where any was stored, 1 for images without.
    Batched by torch's `default_collate`, `batch["latents"]` is [B, C, H/8, W/8], gathered from the files in one
    copy.

    Args:
        path: the store's folder, or its address in object storage ("s3://bucket/latents").
        scaled: latents as training takes them, `(raw - shift) * scale`; False gives what the VAE gave.
        flip: probability of the mirrored image's latent (and mask), drawn at every read; needs stored flips.
        collection: which part of the store; needed only if it holds several.
        text_outputs: the model family, e.g. "flux", whose text encoders' outputs of the image's caption belong to an
            item; they are in the folder `text` of the store.
        caption_dropout: probability that an item has the empty caption and its outputs, drawn at every read.
        verify: checksums, see `LatentStore`.
        generator: source of randomness for `flip`, `caption_dropout` and sampling stored posteriors; None: torch's
            own. In workers of a `DataLoader` its seed is mixed with the worker's, which follows from the loader's
            `generator`; ranks whose generators have one seed draw differently.

    Attributes:
        bucket_indices: [N] int32, position in `bucket_set`.

    Raises:
        LatentStoreError: no store there, nothing in it, `flip` where an item has no flip stored, `caption_dropout`
            where none has a caption, items of two VAEs, or a caption without outputs.
        KohyaBucketError: a probability outside of 0 to 1.

    Examples:
        >>> latents = BucketedLatentDataset("latents")
        >>> tuple(latents[0]["latents"].shape), latents[0]["caption"]
        ((3, 56, 72), 'a photo')
        >>> loader = bucketed_loader(latents, batch_size=2, seed=42)
        >>> [tuple(batch["latents"].shape) for batch in loader]
        [(2, 3, 56, 72), (2, 3, 72, 56), (2, 3, 56, 72)]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        scaled: bool = True,
        flip: float = 0.0,
        collection: str | None = None,
        text_outputs: str | None = None,
        caption_dropout: float = 0.0,
        verify: str = "first",
        generator: torch.Generator | None = None,
    ) -> None:
        self.scaled = as_flag("scaled", scaled)
        for name, value in (("flip", flip), ("caption_dropout", caption_dropout)):
            refuse_other(name, value, _probability, KohyaBucketError)
        self.flip, self.caption_dropout = float(flip), float(caption_dropout)
        self.store = LatentStore(path, verify=verify)
        self.generator = generator
        self._own: tuple[tuple[int, int], torch.Generator] | None = None  # of this rank and worker process
        self._rank: int | None = None  # in a spawned worker, which belongs to no process group
        self._rows = self._choose(collection)
        sizes = self.store.bucket_sizes[self._rows]
        sizes_in_use, self.bucket_indices = distinct_sizes(sizes, np.ones(len(sizes), dtype=np.bool_), 1)
        self.bucket_set = BucketSet.from_dims(sizes_in_use or (), name="latents")
        table = self.store.table
        self._captioned = table["caption"].null_count < len(table)
        if caption_dropout and table["caption"].take(self._rows).null_count == len(self._rows):
            raise LatentStoreError(f"caption_dropout is {caption_dropout}, but no item of {path} has a caption")
        self._texts = {name: table[name] for name in ("caption", "source")}
        self._originals = [self.store.column(f"original_{side}") for side in ("width", "height")]
        self._crops = [self.store.column(f"ltrb_{side}") for side in SIDES]
        self._masked = np.asarray(self.store.column("mask_row") != WITHOUT_MASKS)
        self._with_masks = bool(self._masked[self._rows].any())
        flips = self.store.column("flip")[self._rows]
        if self.flip and not flips.all():
            raise LatentStoreError(
                f"{path} has no flipped latents of {int((~flips).sum())} of its {len(flips)} items: run "
                "`kohya-bucket precompute` again with --flip, for all of its images"
            )
        self._one_vae()
        self._outputs: tuple[LatentStore, npt.NDArray[np.int64]] | None = None
        if text_outputs is not None:
            folder = self.store.layout.root / TEXT_FOLDER
            if not Layout(folder).exists():
                raise LatentStoreError(f"{folder} does not exist, so there are no outputs of text encoders: {_HOW}")
            texts, captions = LatentStore(folder, verify=verify), table["caption"].take(self._rows).to_pylist()
            captions += [None] * bool(caption_dropout)  # at -1: what a caption that is dropped trains
            self._outputs = texts, _rows_of_captions(texts, text_outputs, captions)

    def _choose(self, collection: str | None) -> npt.NDArray[np.int64]:
        collections = self.store.collections()
        if not collections:
            raise LatentStoreError(f"{self.store.layout.root} holds no latents: run `kohya-bucket precompute`")
        if collection is None and len(collections) > 1:
            raise LatentStoreError(
                f"{self.store.layout.root} holds several collections: choose one with collection=, of {collections}"
            )
        chosen = collections[0] if collection is None else collection
        if chosen not in collections:
            raise LatentStoreError(f"{self.store.layout.root} has no collection {chosen!r}, but {collections}")
        rows = self.store.in_collection(chosen)
        if "text" in self.store.table["kind"].take(rows).unique().to_pylist():
            raise LatentStoreError(f"{self.store.layout.root} holds outputs of text encoders: name the store around it")
        return rows

    def _one_vae(self) -> None:
        """Latents of two VAEs do not belong into one training; what an import could not tell may be of any."""
        vaes = self.store.table["vae"].take(self._rows).value_counts().to_pylist()
        items_of_vae = Counter({row["values"]: row["counts"] for row in vaes})
        items_of_vae.pop(UNKNOWN_VAE, None)
        if len(items_of_vae) > 1:
            counts = ", ".join(f"{n} of {vae[:8]}" for vae, n in items_of_vae.most_common())
            raise LatentStoreError(
                f"{self.store.layout.root} holds latents of several VAEs ({counts}): let `kohya-bucket precompute` "
                "finish for all images with one of them, and drop those without images by `kohya-bucket cache prune "
                "--gone`; to keep both, give each a --collection"
            )

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned worker, to which torch cannot hand the generator itself."""
        state = self.__dict__ | {"_own": None, "_rank": self._known_rank}
        if self.generator is not None:
            state["generator"] = self.generator.get_state().numpy().copy()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.generator, np.ndarray):
            self.generator = torch.Generator()
            self.generator.set_state(torch.from_numpy(state["generator"].copy()))

    @property
    def _known_rank(self) -> int:
        return world()[1] if self._rank is None else self._rank

    def _random(self) -> torch.Generator | None:
        """The generator; but one of its own in each worker and on each rank but the first, which have equal copies."""
        worker, rank = get_worker_info(), self._known_rank
        if self.generator is None or (worker is None and not rank):
            return self.generator
        key = rank, 0 if worker is None else worker.seed
        if self._own is None or self._own[0] != key:
            seed = hash((self.generator.initial_seed(), *key)) & (2**63 - 1)
            self._own = key, torch.Generator().manual_seed(seed)
        return self._own[1]

    def _drawn(self, probability: float, n: int) -> list[bool]:
        if not probability:
            return [False] * n
        random = self._random()
        return [bool(torch.rand((), generator=random) < probability) for _ in range(n)]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def shards(self) -> npt.NDArray[np.int32]:
        """[N] number of the shard that each item lies in."""
        return self.store.shard_numbers()[self._rows]

    @property
    def image_names(self) -> list[str]:
        """[N] the images as the store names them."""
        names: list[str] = self._texts["source"].take(self._rows).to_pylist()
        return names

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self.store.layout.root)!r} n={len(self)} n_buckets={len(self.bucket_set)}>"

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Items of one bucket, as a `DataLoader` asks for them: their latents are slices of one tensor."""
        numbers = [item_number(index, len(self)) for index in indices]
        for index, number in zip(indices, numbers, strict=True):
            at = int(self.bucket_indices[number])
            if (wanted := bucket_of(index, at)) != at:
                raise LatentStoreError(
                    f"item {int(index)} is to be trained in bucket {self.bucket_set[wanted]}, but was encoded for "
                    f"{self.bucket_set[at]}: latents cannot be cropped again, so plan without 'merge', 'catch_all' "
                    "and resolutions"
                )
        rows = [int(self._rows[number]) for number in numbers]
        flips = self._drawn(self.flip, len(rows))
        if len({int(self.bucket_indices[number]) for number in numbers}) > 1:
            return [self.__getitems__([index])[0] for index in indices]
        self.store.expect_latents(rows, flips, masks=self._with_masks)
        latents = self._latents(rows, flips)
        dropped = self._drawn(self.caption_dropout, len(rows))
        items = [self._item(*each) for each in zip(numbers, rows, flips, dropped, strict=True)]
        originals, crops = _gathered(self._originals, rows, np.int64), _gathered(self._crops, rows, np.float32)
        # Of a mirrored image left and right change places, and are counted from the other side.
        width, mirrored = items[0]["bucket"].width, torch.tensor(flips)
        crops[mirrored, 0], crops[mirrored, 2] = width - crops[mirrored, 2], width - crops[mirrored, 0]
        for k, item in enumerate(items):
            item["latents"], item["original_size"], item["crop_ltrb"] = latents[k], originals[k], crops[k]
            item.gathered = latents
        return list(items)

    def _latents(self, rows: list[int], flips: list[bool]) -> torch.Tensor:
        store = self.store
        bits = store.gather(rows, flips)
        if len({store.info(row).space for row in rows}) > 1:  # imported and encoded ones may be scaled otherwise
            return torch.cat([self._latents([row], [flip]) for row, flip in zip(rows, flips, strict=True)])
        space = store.info(rows[0]).space
        if store.info(rows[0]).latents.dtype == "bfloat16":
            out = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        else:
            out = torch.from_numpy(bits)
        if store.info(rows[0]).kind == "posterior":
            mean, spread = out[:, 0].float(), out[:, 1].float()
            noise = torch.randn(mean.shape, generator=self._random())
            return _scale(mean + spread * noise, space, self.scaled).to(out.dtype)
        return _scale(out, space, self.scaled).to(out.dtype)

    def _item(self, number: int, row: int, flip: bool, dropped: bool) -> Item:
        at = int(self.bucket_indices[number])
        item = Item(bucket=self.bucket_set[at], bucket_idx=at, path=self._texts["source"][row].as_py())
        if self._captioned:
            item["caption"] = "" if dropped else self._texts["caption"][row].as_py() or ""
        if self._outputs is not None:
            texts, rows = self._outputs
            item["text_outputs"] = _outputs_at(texts, int(rows[-1 if dropped else number]))
        if self._with_masks:
            item["alpha_mask"] = self._mask(row, self.bucket_set[at], flip)
        return item

    def _mask(self, row: int, bucket: Bucket, flip: bool) -> torch.Tensor:
        mask = self.store.read_mask(row) if self._masked[row] else None
        if mask is None:
            return torch.ones((bucket.height, bucket.width))
        out = torch.from_numpy(mask.astype(np.float32) / np.float32(255))
        return out.flip(1) if flip else out


def _gathered(columns: list[npt.NDArray[Any]], rows: list[int], kind: type[np.number]) -> torch.Tensor:
    return torch.from_numpy(np.stack([column[rows].astype(kind) for column in columns], axis=1))


register_bucket_collation()
