"""Text encoders of the real architectures with few random weights, behind sd-scripts' real strategies."""

import importlib
import zlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

VOCABULARY = 256  # as many as the letters of `training_runs._tokenizers`


class WordTokenizer:
    """Stands in for a tokenizer (no download): a number for each word, an end, and padding."""

    bos_token_id, eos_token_id = 1, 2

    def __init__(self, model_max_length: int = 77, pad_token_id: int = 0, salt: str = "") -> None:
        self.model_max_length, self.pad_token_id, self.salt = model_max_length, pad_token_id, salt

    def get_vocab(self) -> dict[str, int]:
        return {"<bos>": 1, "<eos>": 2, f"salt {self.salt}": 3}

    def __call__(self, text: Any, max_length: int | None = None, **_: Any) -> Any:
        length = max_length or self.model_max_length
        rows = []
        for one in [text] if isinstance(text, str) else text:
            words = [3 + zlib.crc32((self.salt + word).encode()) % (VOCABULARY - 3) for word in one.split()]
            rows.append([1, *words[: length - 2], 2])
        ids = torch.tensor([row + [self.pad_token_id] * (length - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
        return _Tokens(input_ids=ids, attention_mask=mask)


class _Tokens(SimpleNamespace):
    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Family(NamedTuple):
    """What a trainer makes before it caches."""

    tokenizing: Any
    encoding: Any
    caching: Any
    models: list[Any]


def make_family(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Family:
    """`sdxl`, or `flux` with `mask` (whether it is applied), and `salt`, another tokenizer's."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    torch.manual_seed(0)
    salt = options.get("salt", "")
    small = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
             "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    clip = CLIPTextModel(CLIPTextConfig(**small, num_hidden_layers=12))
    strategies = importlib.import_module(f"library.strategy_{name}")
    if name == "sdxl":
        models = [clip, CLIPTextModelWithProjection(CLIPTextConfig(**small, num_hidden_layers=3))]
        tokenizing = object.__new__(strategies.SdxlTokenizeStrategy)  # which would load tokenizers
        tokenizing.tokenizer1, tokenizing.tokenizer2 = WordTokenizer(pad_token_id=2, salt=salt), WordTokenizer()
        tokenizing.max_length = 77
        encoding = strategies.SdxlTextEncodingStrategy()
        caching = strategies.SdxlTextEncoderOutputsCachingStrategy(True, 2, False)
    else:
        t5 = T5EncoderModel(T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4))
        models = [clip, t5]
        tokenizing = object.__new__(strategies.FluxTokenizeStrategy)
        tokenizing.clip_l, tokenizing.t5xxl = WordTokenizer(salt=salt), WordTokenizer(512)
        tokenizing.t5xxl_max_length = options.get("length", 256)
        mask = options.get("mask", True)
        encoding = strategies.FluxTextEncodingStrategy(apply_t5_attn_mask=mask)
        caching = strategies.FluxTextEncoderOutputsCachingStrategy(True, 2, False, apply_t5_attn_mask=mask)
    return Family(tokenizing, encoding, caching, [model.to(dtype).eval() for model in models])
