"""Settings that sd-scripts refuses together with its caches, and those that it silently ignores there.

Source: `is_latent_cacheable` and `is_text_encoder_output_cacheable` of its datasets, and what its trainers assert of
`--cache_latents` and `--cache_text_encoder_outputs`. Captions are encoded as they stand in their files:
`process_caption` is not called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.captions import check_blank, check_marks
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.door.programs import Programs
from kohya_bucket.trainers.sdscripts.config.keys import DatasetConfig, SubsetConfig
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES

_LATENTS, _TEXT = "cache_latents", "cache_text_encoder_outputs"
_ANIMA = tuple(file for file, _ in ARCHITECTURES["anima"].trainers)
_SD = tuple(file for file, _ in ARCHITECTURES["sd"].trainers)
NO_TEXT_CACHE = (*_SD, "sdxl_train_textual_inversion.py")
"""Trainers that cannot cache text-encoder outputs."""
IGNORING = ("lumina_train_network.py",)
"""Trainers that cache them without checking other settings."""


@dataclass(frozen=True)
class Refusal:
    """One pair of settings that exclude each other.

    Attributes:
        cache: which cache.
        setting: the other setting.
        why: what follows "because".
        takes: trainers that accept the pair; all others with such a cache refuse it.
        only: the trainers that refuse it; empty for all.
        of: the trainers that have this setting; empty for all.
        must: the setting is refused where it is missing.
        unless: an option that lifts the refusal.
    """

    cache: str
    setting: str
    why: str
    takes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    must: bool = False
    unless: str = ""


_PIXELS, _WORDS = "the pixels differ in each epoch", "the caption differs in each step"
_TRAINED = "the outputs of a text encoder that is trained change"
REFUSALS = (
    Refusal(_LATENTS, "color_aug", _PIXELS),
    Refusal(_LATENTS, "random_crop", _PIXELS),
    Refusal(_LATENTS, "train_inpainting", "each step draws another mask"),
    Refusal(_TEXT, "shuffle_caption", _WORDS, takes=IGNORING),
    Refusal(_TEXT, "token_warmup_step", _WORDS, takes=IGNORING),
    Refusal(_TEXT, "caption_tag_dropout_rate", _WORDS, takes=IGNORING),
    Refusal(_TEXT, "caption_dropout_rate", _WORDS, takes=(*IGNORING, *_ANIMA)),
    Refusal(_TEXT, "weighted_captions", "weights are not cached", only=("sdxl_train.py",)),
    Refusal(_TEXT, "train_text_encoder", _TRAINED, of=("sdxl_train.py", "sd3_train.py"), unless="use_t5xxl_cache_only"),
    Refusal(_TEXT, "train_t5xxl", _TRAINED, of=("sd3_train.py", "sd3_train_network.py", "flux_train_network.py")),
    Refusal(
        _TEXT, "network_train_unet_only", _TRAINED, only=("sdxl_train_network.py", "anima_train_network.py"), must=True
    ),
)
"""Every pair that a trainer of sd-scripts 0.10.1 to 0.12 refuses."""


def check_caches(dataset: DatasetConfig, findings: Findings, programs: Programs) -> None:
    """Name the settings at which the trainer stops because of its caches."""
    for refusal in REFUSALS:
        for place in _set_at(refusal, dataset):
            _refuse(refusal, place, dataset, findings, programs)


def _set_at(refusal: Refusal, dataset: DatasetConfig) -> Iterable[str]:
    """Places where both are set: subsets, or the dataset."""
    caches = dataset.caches_latents if refusal.cache == _LATENTS else dataset.caches_text
    if not caches or (refusal.unless and getattr(dataset, refusal.unless)):
        return []
    if refusal.must:
        return [dataset.place] * bool(dataset.network_module and not getattr(dataset, refusal.setting))
    if hasattr(dataset, refusal.setting):
        return [dataset.place] * bool(getattr(dataset, refusal.setting))
    return [subset.place for subset in dataset.subsets if getattr(subset, refusal.setting)]


def _refuse(refusal: Refusal, place: str, dataset: DatasetConfig, findings: Findings, programs: Programs) -> None:
    # Of the programs that may train this, those that can cache it and know the setting; of these, which stop, and which
    # train captions as they are cached.
    files = [file for file in programs.steps if "_network" in file or not dataset.network_module]
    able = [file for file in files if refusal.cache == _LATENTS or file not in NO_TEXT_CACHE]
    able = [file for file in able if file in refusal.of or not refusal.of]
    refusing = [file for file in able if file not in refusal.takes and (file in refusal.only or not refusal.only)]
    ignoring = [file for file in able if file in IGNORING and file in refusal.takes]
    setting, cache = refusal.setting, refusal.cache
    if refusal.must:
        message, remedy = f"{cache} is set without {setting}", f"set {setting}, or leave {cache} out"
    else:
        message, remedy = f"{setting} is set beside {cache}", "leave one of them out"
    if refusing:
        others = [file for file in able if file not in refusing]
        who = f" ({some(refusing)})" if refusal.only else f" (all but {some(others, 4)})"
        who = who if others else ""
        report = findings.warning if refusal.only and who else findings.error
        message += f", at which sd-scripts stops{who}, because {refusal.why}"
        report("cache-conflict", place, message, remedy, (cache, setting))
    elif ignoring:
        message += f": {some(ignoring)} trains the captions as they are cached, so that it does nothing"
        findings.warning("cached-captions", place, message, remedy, (cache, setting))


def check_captions(
    dataset: DatasetConfig, subset: SubsetConfig, captions: Sequence[tuple[str, str | None]], cut: Sequence[str],
    findings: Findings,
) -> None:  # fmt: skip
    """Name captions that are trained only in part, or not as meant.

    Args:
        captions: (name, what is trained) of each image, before `process_caption`.
        cut: names of those that have further lines, which sd-scripts leaves out.
    """
    texts = [(name, text) for name, text in captions if text]
    check_marks(texts, subset.place, findings, subset.metadata_file)
    lines_named, on_purpose = set(cut), subset.class_tokens
    said = [(name, text) for name, text in captions if name not in lines_named and text != on_purpose]
    check_blank(said, len(captions), subset.place, findings)
    if not subset.enable_wildcard:
        cut = [*cut, *(name for name, text in texts if "\n" in text)]
        trained = {name: text.partition("\n")[0].strip() for name, text in texts}
        empty = [name for name in cut if not trained.get(name)]
        if cut:
            message = f"{counted(len(cut), 'caption')} of several lines, of which sd-scripts trains only the first "
            message += f"({some(cut, 2)})"
            message += f"; of {len(empty):,} the first line is blank, so an empty caption is trained" if empty else ""
            remedy = "write each caption in one line; with enable_wildcard = true one line is trained at random"
            findings.warning("caption-lines", subset.place, message, remedy, cut)
    if dataset.caches_text:
        _check_cached(subset, texts, findings)


def _check_cached(subset: SubsetConfig, texts: Sequence[tuple[str, str]], findings: Findings) -> None:
    """Name settings that change captions during training, and do nothing where their outputs are cached."""
    why = f"with {_TEXT} each caption is cached as it stands in its file"
    drawn = [name for name, text in texts if "\n" in text or "{" in text or "}" in text]
    if subset.enable_wildcard and drawn:
        message = (
            f"enable_wildcard does nothing, because {why}: {counted(len(drawn), 'caption')} with wildcards or several "
            f"lines are trained with all of it, braces too ({some(drawn, 2)})"
        )
        findings.warning("cached-captions", subset.place, message, f"leave {_TEXT} out, or write them out", drawn)
    second = subset.secondary_separator
    without = [name for name in ("caption_prefix", "caption_suffix") if getattr(subset, name)]
    without += ["secondary_separator"] * bool(second and any(second in text for _, text in texts))
    without += ["caption_dropout_every_n_epochs"] * (subset.caption_dropout_every_n_epochs > 0)
    if without:
        message = f"{' and '.join(without)} {'does' if len(without) == 1 else 'do'} nothing, because {why}"
        findings.warning(
            "cached-captions", subset.place, message, f"leave {_TEXT} out, or change the captions", without
        )
