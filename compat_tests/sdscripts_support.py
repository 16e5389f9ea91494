"""Builds sd-scripts' real dataset groups from a config, at every supported version, without a model."""

import argparse
import importlib
import importlib.util
import json
import random
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image


class LibraryNames:
    """sd-scripts' classes and functions by their names, each from the module that defines it in the version at hand.

    Until 0.10 most were in `library.train_util`, which only hands them on since 0.11.
    """

    _MODULES = ("train_util", "dataset", "caching", "args", "accelerator_setup", "strategy_base")

    def __init__(self) -> None:
        self._home_of: dict[str, Any] = {}
        for name in self._MODULES:
            if importlib.util.find_spec(f"library.{name}"):
                importlib.import_module(f"library.{name}")

    def __getattr__(self, name: str) -> Any:
        home = self._home_of.get(name)
        if home is None or name not in vars(home):  # what stands there may be replaced, where it stands does not change
            home = self._home_of[name] = self._find(name)
        return vars(home)[name]

    def _find(self, name: str) -> Any:
        modules = [module for key, module in list(sys.modules.items()) if key.startswith("library.")]
        holders = [module for module in modules if name in vars(module)]
        if not holders:
            raise AttributeError(f"no module of this sd-scripts has {name}")
        own = [module for module in holders if getattr(vars(module)[name], "__module__", None) == module.__name__]
        return (own or holders)[0]


class StubTokenizer:
    """Stands in for CLIP's tokenizer (no download): 77 numbers that depend on the caption."""

    model_max_length = 77
    pad_token_id = eos_token_id = 0

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        numbers = [ord(c) % 1000 for c in text[:77]]
        return SimpleNamespace(input_ids=torch.tensor([numbers + [0] * (77 - len(numbers))]))

    def tokenize(self, text: str) -> list[torch.Tensor]:
        return [self(text).input_ids]


class MeanVAE(torch.nn.Module):
    """Stands in for a VAE: eight by eight means of the picture, and it counts what it encodes."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.encoded = 0

    def encode(self, images: torch.Tensor) -> SimpleNamespace:
        self.encoded += len(images)
        latents = torch.nn.functional.avg_pool2d(images[:, :1].repeat(1, 4, 1, 1), 8)
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: latents))


ACCELERATOR = SimpleNamespace(
    num_processes=1, process_index=0, device=torch.device("cpu"), wait_for_everyone=lambda: None
)


def build_groups(sd: SimpleNamespace, config: dict[str, Any], seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
    """(training group, validation group or None) of a user config, as the trainers build them."""
    train_util, config_util = sd.train_util, sd.config_util
    random.seed(seed)
    parser = argparse.ArgumentParser()
    train_util.add_dataset_arguments(parser, True, True, True)
    train_util.add_training_arguments(parser, True)
    namespace = parser.parse_args([])
    vars(namespace).update(arguments)
    train_util.prepare_dataset_args(namespace, True)
    from library import strategy_base, strategy_sd

    strategy_base.TokenizeStrategy._strategy = StubTokenizer()
    strategy_base.LatentsCachingStrategy._strategy = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 1, False)
    sanitizer = config_util.ConfigSanitizer(True, True, True, True)
    blueprint = config_util.BlueprintGenerator(sanitizer).generate(config, namespace)
    made = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
    train, validation = made if isinstance(made, tuple) else (made, None)
    for group in (train, validation):
        if group is not None and hasattr(group, "set_current_strategies"):
            group.set_current_strategies()
    return train, validation


def cache_latents(group: Any, encoder: Any, strategy: Any = None) -> None:
    """The group's latents are cached as a trainer of SD 1.5 does, or by another strategy; it is ready to train then."""
    from library import strategy_base, strategy_sd

    strategy = strategy or strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 2, False)
    strategy_base.LatentsCachingStrategy._strategy = strategy
    group.new_cache_latents(encoder, ACCELERATOR)
    group.set_current_strategies()


def write_images(
    folder: Path, sizes: list[tuple[int, int]], prefix: str = "img", formats: tuple[str, ...] = ("png",)
) -> list[Path]:
    """One small image file per size, with a caption beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, (width, height) in enumerate(sizes):
        pixels = np.random.default_rng(i).integers(0, 255, (height, width, 3), dtype=np.uint8)
        path = folder / f"{prefix}_{i:03d}.{formats[i % len(formats)]}"
        Image.fromarray(pixels).save(path)
        path.with_suffix(".txt").write_text(f"number {i}, one, two, three", encoding="utf-8")
        paths.append(path)
    return paths


def write_metadata(file: Path, paths: list[Path], sizes: bool = False) -> Path:
    entries: dict[str, dict[str, Any]] = {}
    for path in paths:
        entries[str(path)] = {"caption": path.stem, "tags": "a, b"}
        if sizes:
            entries[str(path)]["image_size"] = list(Image.open(path).size)
    file.write_text(json.dumps(entries), encoding="utf-8")
    return file


def random_sizes(count: int, seed: int, low: int = 64, high: int = 400) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return [(int(w), int(h)) for w, h in rng.integers(low, high, (count, 2))]


def image_table(dataset: Any) -> list[tuple[Any, ...]]:
    """What decides how each image is trained, in the dataset's order."""
    return [
        (key, info.num_repeats, tuple(info.image_size), tuple(info.bucket_reso), tuple(info.resized_size))
        for key, info in dataset.image_data.items()
    ]


def key_of(arrays: Mapping[str, Any], part: str) -> str:
    """The one key in an npz of one size for a part: `latents`, or since 0.10.2 `latents_16x16`."""
    (key,) = (key for key in arrays if re.fullmatch(rf"{part}(_\d+x\d+)?", key))
    return key


def part_of(arrays: Mapping[str, Any], part: str) -> Any:
    return arrays[key_of(arrays, part)]


def metadata(file: Path) -> dict[str, str]:
    """What a trainer wrote about the run into a safetensors file."""
    return json.loads(_parts(file)[0])["__metadata__"]


def tensors(file: Path) -> bytes:
    """The weights in a safetensors file."""
    return _parts(file)[1]


def _parts(file: Path) -> tuple[bytes, bytes]:
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return data[8 : 8 + length], data[8 + length :]
