"""CLIP's tokenizer reads typography otherwise in some versions: captions are encoded as the trainer reads them."""

import pytest
from sdscripts_support import write_images
from small_text_encoders import make_family
from test_sdscripts_text_outputs import Run, adapter, bases  # noqa: F401
from training_runs import _tokenizers

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("ftfy", reason="ftfy, which sd-scripts requires, is not installed")

from kohya_bucket.latents.encode import text_encoder  # noqa: E402
from kohya_bucket.latents.encode.text_encoder import SAMPLE, tokens_hash  # noqa: E402

CAPTIONS = ["it’s", "“quoted”", "ＡＢＣ", "caf&eacute; &amp; bar", "ﬁne", "naïve — don't", "two  words\tand\nlines"]
CLIP = "openai_clip-vit-large-patch14"


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return _tokenizers(tmp_path_factory.mktemp("tokenizers"))


def without_ftfy(folder):
    """CLIP's tokenizer as transformers 5 has it."""
    return transformers.AutoTokenizer.from_pretrained(folder)


def with_ftfy(folder):
    """CLIP's tokenizer of the trainer at hand, if it cleans captions."""
    try:
        from library.clip_tokenizer import CLIPTokenizer
    except ImportError:
        CLIPTokenizer = transformers.CLIPTokenizer
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    if tokenizer("it’s").input_ids != tokenizer("it's").input_ids:
        pytest.skip("this version of sd-scripts cleans no captions with this transformers")
    return tokenizer


@pytest.mark.parametrize("pad", ["<|endoftext|>", "!"])  # SD 1.5's, SD 2's
def test_tokens_are_those_of_the_trainer(unpatched, letters, pad):
    theirs, ours = with_ftfy(letters / CLIP), without_ftfy(letters / CLIP)
    theirs.pad_token = ours.pad_token = pad
    encoder = object.__new__(text_encoder.TransformersTextEncoder)
    encoder.__dict__.update(_tokenizers=[ours], _lengths=[77], _clean=[text_encoder._cleaner(ours)])
    asked = {"max_length": 77, "padding": "max_length", "truncation": True, "return_tensors": "pt"}
    for caption in CAPTIONS:
        want = theirs(caption, **asked).input_ids
        assert encoder._tokens(0, [caption])["input_ids"].tolist() == want.tolist(), caption
    assert all(ours(caption).input_ids != theirs(caption).input_ids for caption in CAPTIONS[:5])


def test_a_fingerprint_is_the_same_with_every_transformers(unpatched, letters):
    """So what was encoded before an update is not encoded again."""
    clip = with_ftfy(letters / CLIP)
    sample = clip(SAMPLE, max_length=77, padding="max_length", truncation=True, return_tensors="pt").input_ids
    assert tokens_hash(sample, {"clip": clip}) == "ef7a5edf9552b4dede7976a71ed1ae05"
    named = [type(name, (), {"get_vocab": lambda _: {"a": 1}})() for name in ("T5TokenizerFast", "T5Tokenizer")]
    assert len({tokens_hash(sample, {"t5": tokenizer}) for tokenizer in named}) == 1


def test_without_ftfy_a_line_says_so(letters, monkeypatch, caplog):
    monkeypatch.setitem(__import__("sys").modules, "ftfy", None)
    with caplog.at_level("WARNING", logger="kohya_bucket"):
        clean = text_encoder._cleaner(without_ftfy(letters / CLIP))
    assert len(caplog.records) == 1
    assert clean("it’s") == "it’s"


def test_outputs_of_a_tokenizer_that_reads_otherwise_are_made_again(unpatched, bases, letters, tmp_path):  # noqa: F811
    write_images(tmp_path / "a", [(128, 128)] * 3)

    def encoded(make):
        family = make_family("sdxl")
        family.tokenizing.tokenizer1 = make(letters / CLIP)
        family.tokenizing.tokenizer1.pad_token = "!"
        with adapter():
            return len(Run(unpatched, bases, family, [tmp_path / "a"]).encoded)

    makes = (without_ftfy, without_ftfy, with_ftfy, with_ftfy)
    assert [encoded(make) for make in makes] == [3, 0, 3, 0]
