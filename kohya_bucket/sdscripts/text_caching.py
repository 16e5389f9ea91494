"""sd-scripts' own loop over captions, with whole and checked files under it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from kohya_bucket.sdscripts.latent_cache import CAPTION_KEY, caption_mark, check_text_npz, savez
from kohya_bucket.sdscripts.processes import is_first_process
from kohya_bucket.sdscripts.while_caching import replaced, wait_for_ranks
from kohya_bucket.sdscripts.wording import recached_lines

__all__ = ["cache_text_outputs"]

logger = logging.getLogger("kohya_bucket")

Original = Callable[[Any, Any, Any], Any]


def cache_text_outputs(dataset: Any, original: Original, strategy: Any, models: Any, accelerator: Any) -> None:
    """`BaseDataset.new_cache_text_encoder_outputs`, with whole files that are checked before they count."""
    if strategy is None or not strategy.cache_to_disk:
        original(dataset, models, accelerator)
        return
    captions = {
        _npz(strategy.get_outputs_npz_path(info.absolute_path)): info.caption for info in dataset.image_data.values()
    }
    accepts = strategy.is_disk_cached_outputs_expected
    reasons: dict[str, str] = {}

    def is_expected(path: str) -> bool:
        if not os.path.exists(path):  # noqa: PTH110
            return False
        if strategy.skip_disk_cache_validity_check:
            return True
        reason = check_text_npz(path, (), captions.get(_npz(path)))
        if reason is None:
            return bool(accepts(path))
        reasons[path] = reason
        return False

    numpys_savez = np.savez

    def save_whole(file: Any, *args: Any, **arrays: Any) -> None:
        if args or not isinstance(file, str):
            numpys_savez(file, *args, **arrays)
            return
        caption = captions.get(_npz(file))
        savez(file, **arrays, **({} if caption is None else {CAPTION_KEY: caption_mark(caption)}))

    with replaced(strategy, {"is_disk_cached_outputs_expected": is_expected}), replaced(np, {"savez": save_whole}):
        original(dataset, models, accelerator)
    wait_for_ranks()
    if is_first_process() and reasons:
        logger.warning("\n".join(recached_lines(reasons)))


def _npz(path: str) -> str:
    return path if path.endswith(".npz") else path + ".npz"
