"""CLIP's and T5's text encoders through transformers, one or several as one encoder; and their identity."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.checks import quoted
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.latents.fingerprint import sampled_hash
from kohya_bucket.latents.hub import only_local

if TYPE_CHECKING:
    from kohya_bucket.latents.store.exact_arrays import Array


# What ftfy changes, and some versions of CLIP's tokenizer do not; in a line of its own, since "<" spares an entity.
_TYPOGRAPHY = "“it’s” ﬁne, ＡＢＣ caf&eacute;\n"
# Words and signs that tokenizers differ in, and more of them than the shorter ones take.
_WORDS = (
    "1girl, solo, a (very:1.2) [old] painting of Über-Straße № 42, 東京の夜景 — cafés & naïve façades; "
    "\\(signed\\) <lora:x:0.5> don't re-render HTTPServer_v2.0! 🙂 émigré snake_case don’t   tabs\tand\nlines "
)
SAMPLE = _TYPOGRAPHY + _WORDS * 12


def encoders_hash(models: Any) -> str:
    """Hash of the text encoders, "" if none has weights; trainers pass None for a missing one."""
    hashes = [sampled_hash(model) for model in models] if isinstance(models, (list, tuple)) else []
    return hashlib.blake2b(" ".join(hashes).encode(), digest_size=16).hexdigest() if any(hashes) else ""


def tokens_hash(sample: Any, tokenizers: Mapping[str, Any]) -> str:
    """Hash of the tokens of `SAMPLE`, in lists of any depth, and of the tokenizers' vocabularies by name."""
    digest = hashlib.blake2b(digest_size=16)
    _update(digest, sample)
    for name, tokenizer in sorted(tokenizers.items()):
        if callable(getattr(tokenizer, "get_vocab", None)):
            words = json.dumps(sorted(tokenizer.get_vocab().items()))
            kind = type(tokenizer).__name__.removesuffix("Fast")  # which transformers 5 drops
            digest.update(f"{name} {kind} {words}".encode())
    return digest.hexdigest()


def _update(digest: Any, tokens: Any) -> None:
    if isinstance(tokens, (list, tuple)):
        for part in tokens:
            _update(digest, part)
        digest.update(b"]")
    elif hasattr(tokens, "detach"):
        digest.update(f"{tuple(tokens.shape)} {tokens.dtype} {tokens.detach().cpu().tolist()}".encode())
    else:
        digest.update(repr(tokens).encode())


_CLASSES = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}
_PROJECTED = "CLIPTextModelWithProjection"
_LONGEST = 4096  # a tokenizer that has no limit says 10**30

logger = logging.getLogger("kohya_bucket")


class TransformersTextEncoder:
    """Outputs of one or more models for a caption; those of the second are named `NAME_2`, and so on.

    `hidden_states` [length, width]; `attention_mask` [length] int64; `pooled` [width] if the model has one, projected
    if it projects. For CLIP, captions are cleaned with ftfy first, as in its training.

    Args:
        models, tokenizers: of transformers, in evaluation mode and on their device.
        lengths: tokens of each; captions are truncated or padded.
        layer: which hidden state: -1 the last with its norm, -2 the one before without a norm.
        apply_mask: padding is not attended to, and is 0 in the output.

    Attributes:
        computes: the types they compute in, and why, where `load_text_encoder` chose them.
    """

    computes = ""

    def __init__(
        self,
        models: Sequence[Any],
        tokenizers: Sequence[Any],
        lengths: Sequence[int],
        *,
        layer: int = -1,
        apply_mask: bool = False,
    ) -> None:
        self._models, self._tokenizers, self._lengths = list(models), list(tokenizers), list(lengths)
        self._layer, self._apply_mask = layer, apply_mask
        self._clean = [_cleaner(tokenizer) for tokenizer in self._tokenizers]
        self.weights = encoders_hash(self._models)
        sample = [self._tokens(k, [SAMPLE])["input_ids"] for k in range(len(self._models))]
        digest = tokens_hash(sample, {str(k): tokenizer for k, tokenizer in enumerate(self._tokenizers)})
        types = ",".join(str(model.dtype).removeprefix("torch.") for model in self._models)
        numbers = ",".join(map(str, self._lengths))
        self.tokens = f"dtype={types} lengths={numbers} layer={layer} apply_mask={apply_mask} tokens={digest}"

    def encode(self, captions: Sequence[str]) -> list[Mapping[str, Array]]:
        """See `TextEncoder`."""
        import torch

        outputs: list[dict[str, Array]] = [{} for _ in captions]
        with torch.inference_mode():
            for k, model in enumerate(self._models):
                for name, values in self._outputs(k, model, captions).items():
                    values = values.float() if values.dtype is torch.bfloat16 else values
                    for of_caption, array in zip(outputs, values.cpu().numpy(), strict=True):
                        of_caption[name if k == 0 else f"{name}_{k + 1}"] = array
        return list(outputs)

    def _outputs(self, k: int, model: Any, captions: Sequence[str]) -> dict[str, Any]:
        tokens = self._tokens(k, captions)
        mask = tokens["attention_mask"].to(model.device)
        attended = {"attention_mask": mask} if self._apply_mask else {}
        out = model(tokens["input_ids"].to(model.device), output_hidden_states=True, **attended)
        states = out.last_hidden_state if self._layer == -1 else out.hidden_states[self._layer]
        if self._apply_mask:
            states = states.masked_fill(mask[..., None] == 0, 0)
        pooled = getattr(out, "text_embeds", getattr(out, "pooler_output", None))
        return {"hidden_states": states, "attention_mask": mask} | ({} if pooled is None else {"pooled": pooled})

    def _tokens(self, k: int, captions: Sequence[str]) -> Any:
        texts, length = [self._clean[k](caption) for caption in captions], self._lengths[k]
        options: dict[str, Any] = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        return self._tokenizers[k](texts, max_length=length, return_attention_mask=True, **options)


def _cleaner(tokenizer: Any) -> Callable[[str], str]:
    """Cleans captions before the tokenizer: CLIP's slow tokenizer did this itself, the fast one does not."""
    if not (type(tokenizer).__name__.startswith("CLIPTokenizer") and tokenizer.is_fast):
        return str
    try:
        fix_text = importlib.import_module("ftfy").fix_text
    except ImportError:
        logger.warning(
            "ftfy is not installed: captions with curly quotes, full-width letters, ligatures or HTML entities become "
            "other tokens than CLIP was trained with (pip install ftfy)"
        )
        return str
    return lambda caption: " ".join(fix_text(caption).split())


def load_text_encoder(
    names: Sequence[str],
    *,
    lengths: Sequence[int] = (),
    dtype: Any = "auto",
    device: str | None = None,
    layer: int = -1,
    apply_mask: bool = False,
) -> TransformersTextEncoder:
    """Load CLIP's or T5's text encoders from Hugging Face names, or folders with a config.json.

    The tokenizer is in the same folder, or beside it as in diffusers: `tokenizer_2` beside `text_encoder_2`.

    Args:
        lengths: tokens of each encoder; missing ones are the maximum of its tokenizer.
        device: None takes the GPU of this process (`LOCAL_RANK`), or the CPU.
        dtype: type they compute in; "auto" is the choice of `fitting_dtype`, where CLIP stays within float16.
        layer, apply_mask: see `TransformersTextEncoder`.

    Raises:
        KohyaBucketError: transformers is missing, a model is of another kind or cannot be loaded, a length is missing.
    """
    import torch

    from kohya_bucket.latents.dtypes import dtype_name
    from kohya_bucket.latents.vae.diffusers_vae import fitting_dtype, own_device, usable_device

    if len(lengths) > len(names):
        raise ConfigError(f"{len(lengths)} lengths for {len(names)} text encoders: give one for each, in order")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise KohyaBucketError(f"text encoders need transformers ({error}): pip install transformers") from error
    device = own_device() if device is None else usable_device(device)
    models, tokenizers, all_lengths, computes = [], [], [], []
    for k, name in enumerate(names):
        model, tokenizer = _loaded(transformers, name)
        positions = getattr(model.config, "max_position_embeddings", _LONGEST)
        length = lengths[k] if k < len(lengths) else min(tokenizer.model_max_length, positions)
        # Nothing bounds the length where neither the tokenizer nor the model has a limit: it must be given.
        if not 0 < length <= positions or (k >= len(lengths) and length >= _LONGEST):
            what = "give one, because its tokenizer has no limit" if length >= _LONGEST else length
            raise ConfigError(f"--max-length of {name}: {what}, at most {positions}")
        fitting = fitting_dtype(device, model.config.model_type.startswith("clip"))  # T5's activations overflow
        chosen, why = fitting if str(dtype) == "auto" else (dtype_name(dtype), "as asked")
        computes.append(f"{chosen} ({why})")
        models.append(model.to(device, getattr(torch, chosen)).eval())
        tokenizers.append(tokenizer)
        all_lengths.append(length)
    layers = min(model.config.num_hidden_layers for model in models)
    if not -layers <= layer <= -1:
        raise ConfigError(f"--layer {layer}: these encoders have -1, the last one, to {-layers}")
    encoder = TransformersTextEncoder(models, tokenizers, all_lengths, layer=layer, apply_mask=apply_mask)
    encoder.computes = " and ".join(dict.fromkeys(computes))
    return encoder


def _loaded(transformers: Any, name: str) -> tuple[Any, Any]:
    where = {"local_files_only": only_local(name)}
    try:
        # Not AutoConfig: older transformers do not know CLIP's text model by itself.
        config, _ = transformers.PretrainedConfig.get_config_dict(name, **where)
        if "model_type" not in config:
            raise OSError("no config.json that names a kind of model")
        kind = _PROJECTED if _PROJECTED in (config.get("architectures") or ()) else _CLASSES.get(config["model_type"])
        if kind is not None:
            model = getattr(transformers, kind).from_pretrained(name, use_safetensors=True, **where)
            return model, transformers.AutoTokenizer.from_pretrained(_tokenizer_folder(name), **where)
    except Exception as error:  # parsers of damaged files raise anything, for merges.txt plain `Exception`
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise KohyaBucketError(
            f"no text encoder with its tokenizer at {quoted(name)}: {first}. Give a Hugging Face name, or a folder "
            "with config.json and safetensors"
        ) from error
    raise ConfigError(f"{name} is of the kind {config['model_type']!r}: what is encoded with here are CLIP and T5")


def _tokenizer_folder(name: str) -> str:
    folder = Path(name)
    beside = folder.with_name(folder.name.replace("text_encoder", "tokenizer")) if folder.name else folder
    is_inside = any((folder / file).is_file() for file in ("tokenizer_config.json", "tokenizer.json"))
    return name if is_inside or beside == folder or not beside.is_dir() else os.fspath(beside)
