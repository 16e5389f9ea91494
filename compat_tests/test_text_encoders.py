"""`precompute --text` with CLIP's and T5's real classes from transformers, few random weights in them."""

import importlib
import shutil

import numpy as np
import pytest
import torch
from training_runs import _tokenizers

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")

from kohya_bucket.datasets.latents import BucketedLatentDataset  # noqa: E402
from kohya_bucket.errors import KohyaBucketError  # noqa: E402
from kohya_bucket.latents.encode.text_encoder import load_text_encoder  # noqa: E402
from tests.command_line import command_line  # noqa: E402, F401
from tests.latents.latent_helpers import fill  # noqa: E402

CAPTIONS = ["caption of a.png", "caption of b.png"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a CLIP, of one that projects, and of a T5 whose tokenizer lies beside it."""
    folder = tmp_path_factory.mktemp("models")
    letters = _tokenizers(folder / "tokenizers")
    clip = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
            "num_hidden_layers": 3, "bos_token_id": 254, "eos_token_id": 255, "projection_dim": 8}  # fmt: skip
    t5 = {"vocab_size": 512, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    made = {
        "clip": transformers.CLIPTextModel(transformers.CLIPTextConfig(**clip)),
        "projected": transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**clip)),
        "text_encoder_2": transformers.T5EncoderModel(transformers.T5Config(**t5)),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer = "google_t5-v1_1-xxl" if name == "text_encoder_2" else "openai_clip-vit-large-patch14"
        place = folder / ("tokenizer_2" if name == "text_encoder_2" else name)
        shutil.copytree(letters / tokenizer, place, dirs_exist_ok=True)
    return folder


def expected(folder, tokenizer, length, dtype, **options):
    """What transformers gives by itself."""
    kind = {"clip": "CLIPTextModel", "projected": "CLIPTextModelWithProjection"}.get(folder.name, "T5EncoderModel")
    model = getattr(transformers, kind).from_pretrained(folder).to(dtype).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(tokenizer)(
        CAPTIONS, max_length=length, padding="max_length", truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        masked = {"attention_mask": tokens.attention_mask} if options.get("mask") else {}
        return tokens.attention_mask, model(tokens.input_ids, output_hidden_states=True, **masked)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_data_set_has_what_transformers_gives(models, tmp_path, command_line, dtype):  # noqa: F811
    fill(tmp_path, ["a.png", "b.png"])
    named = [part for name in ("projected", "text_encoder_2") for part in ("--text-encoder", models / name)]
    options = [*named, "--max-length", 77, "--max-length", 256, "--dtype", dtype, "--device", "cpu"]
    code, text, error = command_line("precompute", "--text", "-o", tmp_path, *options)
    assert (code, "3 encoded" in text) == (0, True), error  # and the empty caption, for dropout
    assert "0 encoded, 3 were current" in command_line("precompute", "--text", "-o", tmp_path, *options)[1]
    kind = getattr(torch, dtype)
    mask, clip = expected(models / "projected", models / "projected", 77, kind)
    mask_2, t5 = expected(models / "text_encoder_2", models / "tokenizer_2", 256, kind)
    want = {"hidden_states": clip.last_hidden_state, "pooled": clip.text_embeds, "attention_mask": mask,
            "hidden_states_2": t5.last_hidden_state, "attention_mask_2": mask_2}  # fmt: skip
    dataset = BucketedLatentDataset(tmp_path, text_outputs="text")
    for k in range(2):
        found = dataset[k]["text_outputs"]
        assert found.keys() == want.keys()
        for name, value in found.items():
            assert value.dtype == want[name].dtype
            assert torch.equal(value, want[name][CAPTIONS.index(dataset[k]["caption"])]), name


def test_another_layer_and_the_mask(models):
    encoder = load_text_encoder([str(models / "clip")], dtype="float32", device="cpu", layer=-2)
    _, want = expected(models / "clip", models / "clip", 77, torch.float32)
    for one, states, pooled in zip(encoder.encode(CAPTIONS), want.hidden_states[-2], want.pooler_output, strict=True):
        assert np.array_equal(one["hidden_states"], states.numpy())
        assert np.array_equal(one["pooled"], pooled.numpy())
    t5 = [str(models / "text_encoder_2")]
    masked = load_text_encoder(t5, lengths=[64], dtype="float32", device="cpu", apply_mask=True)
    mask, want = expected(models / "text_encoder_2", models / "tokenizer_2", 64, torch.float32, mask=True)
    for one, states, places in zip(masked.encode(CAPTIONS), want.last_hidden_state, mask.bool(), strict=True):
        assert np.array_equal(one["hidden_states"], states.masked_fill(~places[:, None], 0).numpy())
        assert not one["hidden_states"][~places.numpy()].any()
    others = [{}, {"lengths": [32]}, {"layer": -2}, {"apply_mask": True}, {"dtype": "bfloat16"}]
    made = [load_text_encoder(t5, **{"lengths": [64], "dtype": "float32", "device": "cpu", **one}) for one in others]
    assert len({encoder.tokens for encoder in made}) == len(others)
    assert len({encoder.weights for encoder in made[:4]}) == 1
    assert load_text_encoder(t5, lengths=[64], device="cpu").tokens == made[0].tokens  # a CPU computes in float32


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nowhere", {}, "no text encoder with its tokenizer at '.*nowhere'"),
        ("tokenizer_2", {}, "no text encoder with its tokenizer"),
        ("gpt2", {}, "is of the kind 'gpt2'"),
        ("text_encoder_2", {}, "--max-length of .*: give one, because its tokenizer has no limit"),
        ("clip", {"lengths": [78]}, "--max-length of .*: 78, at most 77"),
        ("clip", {"lengths": [77, 77]}, "2 lengths for 1 text encoders"),
        ("clip", {"layer": -4}, "--layer -4: these encoders have -1, the last one, to -3"),
        ("clip", {"layer": 0}, "--layer 0"),
        ("clip", {"dtype": "int8"}, "int8"),
    ],
)
def test_what_cannot_be_encoded_with(models, name, options, said, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if name == "gpt2":
        transformers.GPT2Config().save_pretrained(models / name)
    with pytest.raises(KohyaBucketError, match=said):
        load_text_encoder([str(models / name)], device="cpu", **options)


def test_without_transformers(models, monkeypatch):
    real = importlib.import_module

    def missing(name, *args):
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name=name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(KohyaBucketError, match="pip install transformers"):
        load_text_encoder([str(models / "clip")], device="cpu")
