"""Where ai-toolkit is held on to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from kohya_bucket.latents.vae.single_frames import fold_single_frames
from kohya_bucket.trainers.ai_toolkit.config import JobKeys, caption_ending, listed
from kohya_bucket.trainers.ai_toolkit.latents import IN_MEMORY, name_to_use, note_made
from kohya_bucket.trainers.ai_toolkit.loaders import PlannedLoader, RankSampler, go_on_together
from kohya_bucket.trainers.ai_toolkit.objects import Dataset, FileItem, SameSize
from kohya_bucket.trainers.door.captions import refuse_broken
from kohya_bucket.trainers.door.options import TABLE
from kohya_bucket.trainers.door.resume import WEIGHING
from kohya_bucket.trainers.door.seams import Replaced, Seam, SeamGroup, calling_frame
from kohya_bucket.trainers.door.shapes import Behaves, Offers, Takes, Uses


def _make_loader(seam: Replaced, dataset_options: Any, batch_size: int = 1, sd: Any = None) -> Any:
    frame = calling_frame()
    process = frame.f_locals.get("self")
    job = getattr(getattr(process, "job", None), "raw_config", None) or {}
    tables = [holder[TABLE] for holder in (job, job.get("config") or {}) if TABLE in holder]
    seam.door.read_options({TABLE: tables[0]} if tables else {}, frame)
    refuse_broken_captions(dataset_options or ())
    fold_vae_of_images(getattr(sd, "vae", None))
    go_on_together(process)
    loader = seam.original(dataset_options, batch_size, sd)
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, RankSampler):
        return loader
    planned = PlannedLoader(loader, sampler)
    if hasattr(process, "get_training_info"):
        names = ("datasets", "datasets_reg")
        name = next((name for name in names if getattr(process, name, None) is dataset_options), names[0])
        seam.door.resume.add(name, planned, process)
    return planned


def refuse_broken_captions(datasets: Iterable[Any]) -> None:
    """Raise `ConfigError` for caption files at which ai-toolkit would stop, before it encodes anything.

    Args:
        datasets: ai-toolkit's own configs of them, or tables with their keys.
    """
    files = list[str]()
    for one in datasets:
        keys_of_dataset: dict[str, Any] = one if isinstance(one, dict) else vars(one)
        keys = JobKeys(
            0,
            keys_of_dataset.get("dataset_path") or keys_of_dataset.get("folder_path") or "",
            num_frames=keys_of_dataset.get("num_frames", 1),
            auto_frame_count=keys_of_dataset.get("auto_frame_count", False),
            caption_ext=caption_ending(keys_of_dataset.get("caption_ext"), keys_of_dataset.get("caption_type")),
        )
        with suppress(OSError, ValueError, TypeError):  # ai-toolkit says so of a source that is not there
            files += listed(keys)[1].values()
    refuse_broken(files, "ai-toolkit")


def fold_vae_of_images(vae: Any) -> None:
    """Let the VAE of Qwen-Image and Krea 2, which came from one of videos, encode images in 2D; others stay.

    It is diffusers' own. The latents differ by less than the rounding of the type that it computes in.
    """
    kind = type(vae)
    if kind.__name__ == "AutoencoderKLQwenImage" and kind.__module__.startswith("diffusers."):
        fold_single_frames(vae)


def _latent_path(seam: Replaced, self: Any, recalculate: bool = False) -> Any:
    chosen = self._latent_path
    path = seam.original(self, recalculate)
    if recalculate or chosen is None:
        path = self._latent_path = name_to_use(self, path, [self.path])
    return path


def _vision_path(seam: Replaced, self: Any, recalculate: bool = False) -> Any:
    chosen = self._clip_vision_embeddings_path
    path = seam.original(self, recalculate)
    if recalculate or chosen is None:
        _begin_embedding(self, path)
        path = self._clip_vision_embeddings_path = name_to_use(self, path, [self.clip_image_path])
    return path


def _cache_latent(
    seam: Replaced, self: Any, file_item: Any, latent_path: str, cached_state_dict: Any, needs_encode: bool,
    to_disk: bool, to_memory: bool,
) -> None:  # fmt: skip
    seam.original(self, file_item, latent_path, cached_state_dict, needs_encode, to_disk, to_memory)
    if needs_encode:
        note_made(file_item)


def _embedding_path(seam: Replaced, self: Any, caption_override: Any = None, text_only: bool = False) -> Any:
    path = seam.original(self, caption_override, text_only)
    _begin_embedding(self, path)
    return name_to_use(self, path, [] if text_only else _seen_with_caption(self))


def _seen_with_caption(item: Any) -> list[str]:
    """The files that an encoder of captions sees besides: control images and clips, or the first frame of a clip."""
    clips = list(getattr(item, "control_video_paths", None) or ())
    if item.encode_control_in_text_embeddings and (item.control_path is not None or clips):
        images = item.control_path or []
        return [*([images] if isinstance(images, str) else images), *clips]
    first = getattr(item, "encode_first_frame_in_text_embeddings", False) and item.dataset_config.do_i2v
    return [item.path] if first and item.is_video else []


_embedded: list[Any] = []  # the item whose embeddings may have been made since


def _begin_embedding(item: Any, path: str) -> None:
    """A file of an item is about to be judged, or made; an item may have several, which are all made behind that."""
    if _embedded and _embedded[-1] is item:
        return
    _note_last_embeddings()
    _embedded.append(item)
    if _noting and os.path.lexists(path):  # an earlier item's too, perhaps, and not looked at yet
        _noting[-1].finish()


def _note_last_embeddings() -> None:
    while _embedded:
        item = _embedded.pop()
        _noting[-1].put(item, 1) if _noting else note_made(item)


_noting: list[Any] = []  # where a dataset's embeddings are looked at, while the next ones are made


def _caching(what: str) -> Callable[[Replaced, Any], None]:
    def cache(seam: Replaced, self: Any) -> None:
        from kohya_bucket.latents.encode.pipeline import Caching

        caching = Caching(what, len(self.file_list), keep=note_made)
        with caching.running():
            _noting.append(caching)
            try:
                seam.original(self)
                _note_last_embeddings()
            finally:
                _noting.clear()

    return cache


def _buckets(theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    from kohya_bucket.buckets.trainers import AIToolkitBuckets

    sizes = [(w, h) for w in range(90, 2900, 307) for h in range(70, 2700, 311)]
    for resolution, step in ((512, 8), (1024, 16), (768, 32)):
        placed = AIToolkitBuckets(resolution, step).place(sizes).bucket_sizes.tolist()
        for (width, height), bucket in zip(sizes, placed, strict=True):
            answer = theirs(width, height, resolution=resolution, divisibility=step)
            how = f"{width}x{height} at {resolution} in steps of {step}"
            yield how, (answer["width"], answer["height"]), tuple(bucket)


_ORDER = (
    Seam(
        "get_dataloader_from_datasets",
        (Takes("dataset_options", "batch_size", "sd"), Uses("AiToolkitDataset", "dto_collation", "buckets")),
        _make_loader,
    ),
    Seam("AiToolkitDataset", (Offers(Dataset),)),
    Seam(
        "AiToolkitDataset._get_single_item",
        (Takes("index", "_attempts"), Uses("file_list", "load_and_process_image", "load_caption")),
    ),
    Seam("AiToolkitDataset.setup_epoch", (Takes(), Uses("epoch_num", "setup_buckets"))),
    Seam("FileItemDTO", (Offers(FileItem),)),
    Seam("Bucket", (Offers(SameSize),)),
    Seam(
        "BucketsMixin.setup_buckets",
        (Uses("scale_to_width", "scale_to_height", "crop_x", "crop_y", "crop_width", "crop_height", "file_list_idx"),),
    ),
    Seam("dto_collation", (Takes("batch"),)),
)

SUBJECTS = (
    SeamGroup("order", "epochs are ai-toolkit's own", _ORDER, orders_epochs=True),
    SeamGroup("weighing", "images of a batch that is shorter than another process' count for more", WEIGHING),
    SeamGroup(
        "latents",
        "latents of other images, and such as were cut off or changed, are trained on",
        (Seam("FileItemDTO.get_latent_path", (Uses("_latent_path", "path"),), _latent_path),),
    ),
    SeamGroup(
        "digests",
        "latents do not say of which image they are, and are trained on as they are",
        (Seam("LatentCachingMixin._cache_one_latent", (Uses("save_file", *IN_MEMORY),), _cache_latent),),
    ),
    SeamGroup(
        "embeddings",
        "text embeddings that are damaged, or of control images that were edited since, are trained on",
        (
            Seam(
                "FileItemDTO.get_text_embedding_info_dict",
                (Uses("encode_control_in_text_embeddings", "control_path", "dataset_config", "do_i2v", "is_video"),),
            ),
            Seam("FileItemDTO._build_text_embedding_path", (Uses("get_text_embedding_info_dict"),), _embedding_path),
            Seam("TextEmbeddingCachingMixin.cache_text_embeddings", (Uses("file_list", "save"),), _caching("caption")),
        ),
    ),
    SeamGroup(
        "vision",
        "what an image encoder makes of pictures is found by their names alone, and trained on when they were edited",
        (
            Seam(
                "FileItemDTO.get_clip_vision_embeddings_path",
                (Uses("_clip_vision_embeddings_path", "clip_image_path"),),
                _vision_path,
            ),
            Seam("CLIPCachingMixin.cache_clip_vision_to_disk", (Uses("file_list", "save_file"),), _caching("picture")),
        ),
    ),
    SeamGroup(
        "planning",
        "`kohya-bucket compare` may show other buckets than those that are trained",
        (Seam("get_bucket_for_image_size", (Behaves(_buckets),)),),
    ),
)
