"""The permanent door: a marked block in a checkout's `library/__init__.py`, empty in every release since 0.6.0."""

from __future__ import annotations

from kohya_bucket.adapter.checkout_patch import CheckoutPatch
from kohya_bucket.sdscripts.checkout import find_checkout

__all__ = ["PATCH"]

PATCH = CheckoutPatch(
    trainer="sd-scripts",
    door="kohya_bucket.sdscripts",
    find=find_checkout,
    file="library/__init__.py",
    trains='any(word in os.path.basename(sys.argv[0]) for word in ("train", "fine_tune"))',
    imports=("library.train_util", "library.config_util"),
)
