"""Runs of sd-scripts' real trainers by their own command lines, in processes of their own.

No checkpoint is needed: `small_models` makes SD 1.5's models tiny in those processes, and a run takes seconds. Where
`SD_MODEL` names an SD 1.5 safetensors file (`SD_TOKENIZERS` a folder for `--tokenizer_cache_dir`), that is trained.
With `KOHYA_BUCKET_GPU=1` they train on the GPU, where runs of several processes are skipped.
"""

import json
import os
import string
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recording import recorded
from sdscripts_support import metadata, tensors

HERE = Path(__file__).resolve().parent
LAUNCHER = ("-m", "kohya_bucket.launch")


@dataclass(frozen=True)
class TrainingRun:
    """How a run ended, and what it left. `batches`: a row for each step, with one entry per process."""

    status: int
    log: str
    out: Path
    batches: list[tuple[dict[str, Any], ...]]

    @property
    def weights(self) -> Path:
        return self.out / "lora.safetensors"

    def assert_trained(self, steps: int) -> None:
        assert self.status == 0, self.log[-3000:]
        assert "kohya_bucket in sd-scripts" in self.log
        assert metadata(self.weights)["ss_steps"] == str(steps)

    @property
    def tensors(self) -> bytes:
        return tensors(self.weights)


def write_config(folder: Path, images: Path, table: str = "", subset: str = "flip_aug = true", **dataset: Any) -> Path:
    """A dataset config of one folder of images, with the text of a `[kohya_bucket]` table after it."""
    keys = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
    lines = ["[[datasets]]", *(f"{key} = {json.dumps(value)}" for key, value in {**keys, **dataset}.items())]
    lines += ["[[datasets.subsets]]", f"image_dir = '{images}'", "caption_extension = '.txt'", subset, table, ""]
    file = folder / "dataset.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def train(
    checkout: Path,
    config: Path,
    *options: Any,
    out: Path,
    door: tuple[str, ...] = LAUNCHER,
    trainer: str = "train_network.py",
    ranks: int = 1,
    network: bool = True,
    models: str = "1",
    python: str = sys.executable,
    cwd: Path | None = None,
    told: Mapping[str, str] | None = None,
) -> TrainingRun:
    """Run a trainer to its end; `out` is made by it, and `out`-batches holds what was trained.

    It runs in the checkout, or in `cwd`, with `told` as further variables of the environment. `models` is what
    `SMALL_MODELS` is set to, see `small_models`.
    """
    on_gpu = bool(os.environ.get("KOHYA_BUCKET_GPU"))
    if on_gpu and ranks > 1:
        pytest.skip("several processes need several GPUs")
    record = out.with_name(f"{out.name}-batches")
    record.mkdir()
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [python, *several, *door, str(checkout / trainer)]
    command += ["--dataset_config", str(config), "--output_dir", str(out), "--output_name", "lora"]
    command += ["--save_model_as", "safetensors", "--learning_rate", "1e-2", "--optimizer_type", "AdamW", "--sdpa"]
    command += [*_network(checkout), "--network_dim", "2"] if network else []
    command += ["--max_data_loader_n_workers", "2", *_models(out.parent), *map(str, options)]
    environment = {
        **os.environ,
        # Another accelerate than the installed one, where a folder holds it.
        "PYTHONPATH": os.pathsep.join(
            filter(
                None,
                [
                    os.environ.get("KOHYA_BUCKET_ACCELERATE"),
                    str(HERE / "small_models"),
                    str(HERE),
                    "" if os.environ.get("KOHYA_BUCKET_WHEEL") else str(HERE.parent),
                ],
            )
        ),
        "SMALL_MODELS": "" if os.environ.get("SD_MODEL") else models,
        "SMALL_TOKENIZERS": str(out.parent / "tokenizers"),
        "RECORD_DIR": str(record),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "500",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # or an accelerate older than this torch loads no random states
        **(told or {}),
    }
    if not on_gpu:
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    output = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    done = subprocess.run(command, cwd=cwd or checkout, env=environment, **output, check=False, timeout=900)
    return TrainingRun(done.returncode, " ".join((done.stderr + done.stdout).split()), out, recorded(record))


def _network(checkout: Path) -> list[str]:
    """A network that this version trains SD 1.5 with: one fork's LoRA begins with weights that no convolution takes.

    LoRA-FA in its place never clears the gradients of its frozen half. They grow from step to step, count where
    gradients are clipped, and are in no saved state: only unclipped does a resumed run end with the same weights.
    """
    lora = (checkout / "networks" / "lora.py").read_text(encoding="utf-8")
    if "torch.linalg.qr" in lora:
        return ["--network_module", "networks.lora_fa", "--max_grad_norm", "0"]
    return ["--network_module", "networks.lora"]


def _models(folder: Path) -> list[str]:
    """Arguments for the checkpoint and its tokenizer."""
    model, tokenizers = os.environ.get("SD_MODEL"), os.environ.get("SD_TOKENIZERS")
    if not model:
        checkpoint = folder / "small.safetensors"
        checkpoint.write_bytes(struct.pack("<Q", 2) + b"{}")  # safetensors that hold nothing
        model, tokenizers = str(checkpoint), str(_tokenizers(folder / "tokenizers"))
    precision = ["--mixed_precision", "bf16" if os.environ.get("SD_MODEL") else "no"]
    return [
        "--pretrained_model_name_or_path",
        model,
        *precision,
        *(["--tokenizer_cache_dir", tokenizers] if tokenizers else []),
    ]


def _tokenizers(folder: Path) -> Path:
    """Tokenizers with a vocabulary of single letters, where sd-scripts looks for SD 1.5's, SDXL's and FLUX's."""
    signs = string.ascii_letters + string.digits + string.punctuation
    tokens = {token: number for number, token in enumerate(c + end for end in ("", "</w>") for c in signs)}
    tokens |= {f"<{number}>": number for number in range(len(tokens), 254)}
    tokens |= {"<|startoftext|>": 254, "<|endoftext|>": 255}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": "<|startoftext|>"}
    settings |= dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    for name in ("openai_clip-vit-large-patch14", "laion_CLIP-ViT-bigG-14-laion2B-39B-b160k"):
        files = {"vocab.json": json.dumps(tokens), "merges.txt": "#version: 0.2\n"}
        _write_files(folder / name, files | {"tokenizer_config.json": json.dumps(settings)})
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((sign, -1.0) for sign in signs)]
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}, end], "pair": []}
    template["special_tokens"] = {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}
    model = {"type": "Unigram", "unk_id": 2, "vocab": words, "byte_fallback": False}
    tokenizer = {"version": "1.0", "added_tokens": [], "post_processor": template, "model": model}
    settings = {"tokenizer_class": "T5TokenizerFast", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    files = {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(settings)}
    _write_files(folder / "google_t5-v1_1-xxl", files)
    settings = json.dumps({"tokenizer_class": "ByT5Tokenizer"})
    _write_files(folder / "google_byt5-small", {"tokenizer_config.json": settings})
    return folder


def _write_files(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
