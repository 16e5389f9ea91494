"""How sd-scripts' strategies encode captions, in words."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from kohya_bucket.latents.text.transformers_encoder import SAMPLE, tokens_hash
from kohya_bucket.sdscripts.objects import TextStrategy

__all__ = ["tokens_of", "tokens_text"]

# by strategy, of which a run has one: what it says of itself before it has worked
_said: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def tokens_text(tokenizing: Any, encoding: Any, caching: TextStrategy) -> str:
    """What outputs depend on besides caption and weights, in words: options of the strategies, precision, tokens.

    The tokens are those of a sample, by which another tokenizer, template or length shows, and the vocabularies.
    """
    parts = [*_options(tokenizing), *_options(encoding)]
    if caching.is_weighted:
        parts.append("is_weighted=True")
    if tokens := tokens_of(tokenizing):
        parts.append(f"tokens={tokens}")
    return " ".join([*parts, f"autocast={_autocast()}"])


def tokens_of(tokenizing: Any) -> str:
    """Hash of a sample's tokens and of the vocabularies; "" without a strategy."""
    if tokenizing is None:
        return ""
    if tokenizing not in _said:
        _said[tokenizing] = tokens_hash(tokenizing.tokenize(SAMPLE), vars(tokenizing))
    return _said[tokenizing]


def _options(strategy: Any) -> list[str]:
    """Plain values; what is left out of cached outputs later, by chance, is no part of them."""
    values = vars(strategy) if hasattr(strategy, "__dict__") else {}
    return [
        f"{name}={value!r}"
        for name, value in sorted(values.items())
        if isinstance(value, (bool, int, float, str)) and name[0] != "_" and "dropout" not in name
    ]


def _autocast() -> str:
    import torch

    if not hasattr(torch, "get_autocast_dtype"):  # until torch 2.3
        if torch.is_autocast_enabled():
            return str(torch.get_autocast_gpu_dtype()).removeprefix("torch.")
        return str(torch.get_autocast_cpu_dtype()).removeprefix("torch.") if torch.is_autocast_cpu_enabled() else "off"
    on = [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
    return str(torch.get_autocast_dtype(on[0])).removeprefix("torch.") if on else "off"
