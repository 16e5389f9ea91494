"""How captions are encoded: by which text encoders, and by what kind of tokens."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from weakref import WeakKeyDictionary

from kohya_bucket.latents.fingerprint import sampled_hash
from kohya_bucket.sdscripts.objects import TextStrategy

__all__ = ["encoders_hash", "tokens_text"]

# Words and signs that tokenizers differ in, and more of them than the shorter ones take.
_SAMPLE = (
    "1girl, solo, a (very:1.2) [old] painting of Über-Straße № 42, 東京の夜景 — cafés & naïve façades; "
    "\\(signed\\) <lora:x:0.5> don't re-render HTTPServer_v2.0! 🙂 émigré snake_case don’t   tabs\tand\nlines "
) * 12

# by strategy, of which a run has one: what it says of itself before it has worked
_said: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def encoders_hash(models: Any) -> str:
    """Hash of the text encoders, "" where there is nothing to tell them by; trainers pass None for what is left out."""
    hashes = [sampled_hash(model) for model in models] if isinstance(models, (list, tuple)) else []
    return hashlib.blake2b(" ".join(hashes).encode(), digest_size=16).hexdigest() if any(hashes) else ""


def tokens_text(tokenizing: Any, encoding: Any, caching: TextStrategy) -> str:
    """What outputs depend on besides caption and weights, in words: options of the strategies, precision, tokens.

    The tokens are those of a sample, by which another tokenizer, template or length shows, and the vocabularies.
    """
    parts = [*_options(tokenizing), *_options(encoding)]
    if caching.is_weighted:
        parts.append("is_weighted=True")
    if tokenizing is not None:
        if tokenizing not in _said:
            _said[tokenizing] = _tokens_hash(tokenizing)
        parts.append(f"tokens={_said[tokenizing]}")
    return " ".join([*parts, f"autocast={_autocast()}"])


def _options(strategy: Any) -> list[str]:
    """Plain values; what is left out of cached outputs later, by chance, is no part of them."""
    values = vars(strategy) if hasattr(strategy, "__dict__") else {}
    return [
        f"{name}={value!r}"
        for name, value in sorted(values.items())
        if isinstance(value, (bool, int, float, str)) and name[0] != "_" and "dropout" not in name
    ]


def _tokens_hash(strategy: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    _update(digest, strategy.tokenize(_SAMPLE))
    for name, tokenizer in sorted(vars(strategy).items()):
        if callable(getattr(tokenizer, "get_vocab", None)):
            words = json.dumps(sorted(tokenizer.get_vocab().items()))
            digest.update(f"{name} {type(tokenizer).__name__} {words}".encode())
    return digest.hexdigest()


def _update(digest: Any, tokens: Any) -> None:
    if isinstance(tokens, (list, tuple)):
        for one in tokens:
            _update(digest, one)
        digest.update(b"]")
    elif hasattr(tokens, "detach"):
        digest.update(f"{tuple(tokens.shape)} {tokens.dtype} {tokens.detach().cpu().tolist()}".encode())
    else:
        digest.update(repr(tokens).encode())


def _autocast() -> str:
    import torch

    if not hasattr(torch, "get_autocast_dtype"):  # until torch 2.3
        if torch.is_autocast_enabled():
            return str(torch.get_autocast_gpu_dtype()).removeprefix("torch.")
        return str(torch.get_autocast_cpu_dtype()).removeprefix("torch.") if torch.is_autocast_cpu_enabled() else "off"
    on = [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
    return str(torch.get_autocast_dtype(on[0])).removeprefix("torch.") if on else "off"
