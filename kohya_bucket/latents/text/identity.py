"""By which text encoders, and by what kind of tokens, captions are encoded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kohya_bucket.latents.fingerprint import sampled_hash

__all__ = ["SAMPLE", "encoders_hash", "tokens_hash"]

# What ftfy changes, and some versions of CLIP's tokenizer do not; in a line of its own, since "<" spares an entity.
_TYPOGRAPHY = "“it’s” ﬁne, ＡＢＣ caf&eacute;\n"
# Words and signs that tokenizers differ in, and more of them than the shorter ones take.
_WORDS = (
    "1girl, solo, a (very:1.2) [old] painting of Über-Straße № 42, 東京の夜景 — cafés & naïve façades; "
    "\\(signed\\) <lora:x:0.5> don't re-render HTTPServer_v2.0! 🙂 émigré snake_case don’t   tabs\tand\nlines "
)
SAMPLE = _TYPOGRAPHY + _WORDS * 12


def encoders_hash(models: Any) -> str:
    """Hash of the text encoders, "" where there is nothing to tell them by; trainers pass None for what is left out."""
    hashes = [sampled_hash(model) for model in models] if isinstance(models, (list, tuple)) else []
    return hashlib.blake2b(" ".join(hashes).encode(), digest_size=16).hexdigest() if any(hashes) else ""


def tokens_hash(sample: Any, tokenizers: Mapping[str, Any]) -> str:
    """Hash of the tokens of `SAMPLE`, in lists of any depth, and of the vocabularies of the tokenizers by name."""
    digest = hashlib.blake2b(digest_size=16)
    _update(digest, sample)
    for name, tokenizer in sorted(tokenizers.items()):
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
