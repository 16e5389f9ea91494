"""Families whose latents the strategies of a checkout cache, and no table here has."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kohya_bucket.buckets import KohyaBuckets
from kohya_bucket.trainers.sdscripts.checkout import own_families, own_programs
from tests.command_line import command_line

__all__ = ["command_line"]
SIZES = [(300, 200), (200, 300), (256, 256), (400, 100)]
BASE = """class AnimaLatentsCachingStrategy(LatentsCachingStrategy):
    SUFFIX = "_anima.npz"
    def load_latents_from_disk(self, path, bucket):
        return self._default_load_latents_from_disk(8, path, bucket)
"""
STRATEGIES = {  # as forks write them: a number, a constant of the file, what the base has
    "number": """class Krea2LatentsCachingStrategy(LatentsCachingStrategy):
    OLD_SUFFIX = ".npz"
    SUFFIX = "_krea2.npz"
    def load_latents_from_disk(self, path, bucket):
        return self._default_load_latents_from_disk(16, path, bucket)
""",
    "constant": """KREA2_STRIDE = 16
class Krea2LatentsCachingStrategy(LatentsCachingStrategy):
    NPZ_SUFFIX = "_krea2.npz"
    def load_latents_from_disk(self, path, bucket):
        return self._default_load_latents_from_disk(KREA2_STRIDE, path, bucket)
""",
    "inherited": """class Krea2LatentsCachingStrategy(strategy_anima.AnimaLatentsCachingStrategy):
    KREA2_LATENTS_NPZ_SUFFIX = "_krea2.npz"
class Krea2TextEncoderOutputsCachingStrategy(TextEncoderOutputsCachingStrategy):
    KREA2_TEXT_NPZ_SUFFIX = "_krea2_te.npz"
""",
}


def write_checkout(folder: Path, strategy: str) -> Path:
    library = folder / "sd-scripts" / "library"
    library.mkdir(parents=True)
    texts = {"train_util": "", "strategy_base": "", "strategy_anima": BASE, "strategy_krea2": STRATEGIES[strategy]}
    for name, text in texts.items():
        (library / f"{name}.py").write_text(text, encoding="utf-8-sig")  # as v0.11.1 has strategy_anima.py
    trainer = "class T:\n    def __init__(self, dataset):\n        dataset.verify_bucket_reso_steps(16)\n"
    (library.parent / "krea2_train_network.py").write_text(trainer, encoding="utf-8")
    (library.parent / "krea2_train.py").write_text("", encoding="utf-8")
    return library.parent


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_their_strategies_say(tmp_path: Path, strategy: str) -> None:
    (family,) = own_families(write_checkout(tmp_path, strategy))
    stride = 8 if strategy == "inherited" else 16
    assert (family.name, family.suffix, family.stride, family.channels) == ("krea2", "_krea2.npz", stride, 0)
    assert family.key_suffixes((512, 256)) == (f"_{256 // stride}x{512 // stride}",)


def test_their_trainers(tmp_path: Path) -> None:
    root = write_checkout(tmp_path, "number")
    for word in ("krea2", str(root / "krea2_train_network.py")):
        found = own_programs(root, word)
        assert found is not None
        assert found.steps["krea2_train_network.py"] == 16
    assert own_programs(root, "krea2").steps["krea2_train.py"] == 1  # type: ignore[union-attr]
    assert own_programs(root, "krea") is None


def test_steps_that_no_model_can_have_ask_for_nothing(tmp_path: Path) -> None:
    root = write_checkout(tmp_path, "number")
    text = "".join(f"d.verify_bucket_reso_steps({n})\n" for n in range(1, 9999))
    (root / "krea2_train.py").write_text(text, encoding="utf-8")
    assert own_programs(root, "krea2").steps["krea2_train.py"] == 1  # type: ignore[union-attr]


@pytest.mark.posix("links of POSIX")
def test_a_checkout_that_is_open_in_an_editor(tmp_path: Path) -> None:
    root = write_checkout(tmp_path, "number")
    (root / ".#krea2_train.py").symlink_to("somebody@somewhere.1234")
    assert own_programs(root, "krea2").steps == {"krea2_train.py": 1, "krea2_train_network.py": 16}  # type: ignore[union-attr]


def test_a_config_is_planned_and_its_caches_are_checked(tmp_path: Path, command_line) -> None:  # type: ignore[no-untyped-def]
    """Of four caches one is of another bucket, one is cut off, and one has no key of its size."""
    root, images = write_checkout(tmp_path, "number"), tmp_path / "images"
    images.mkdir()
    config = tmp_path / "c.toml"
    text = "[[datasets]]\nresolution = 256\nenable_bucket = true\nmin_bucket_reso = 128\nbucket_reso_steps = 16\n"
    text += f"[[datasets.subsets]]\nimage_dir = '{images.as_posix()}'\ncaption_extension = '.txt'\n"
    config.write_text(text, encoding="utf-8")
    placed = KohyaBuckets((256, 256), 128, 1024, 16).place(SIZES).bucket_sizes.tolist()
    for i, ((width, height), (w, h)) in enumerate(zip(SIZES, placed, strict=True)):
        Image.new("RGB", (width, height)).save(images / f"{i}.png")
        (images / f"{i}.txt").write_text("a caption", encoding="utf-8")
        shape, keys = (5, h // 16 + (i == 1), w // 16), f"_{h // 16}x{w // 16 + (i == 2)}"
        parts = {"latents": np.zeros(shape, np.float32), "original_size": np.array([width, height])}
        parts["crop_ltrb"] = np.zeros(4)
        file = images / f"{i}_{width:04d}x{height:04d}_krea2.npz"
        np.savez(file, **{part + keys: array for part, array in parts.items()})
        if i == 3:
            file.write_bytes(file.read_bytes()[:-200])
    code, out, _ = command_line("plan", config, "--sd-scripts", root, "--arch", "krea2", "--json")
    assert code == 0
    rows = json.loads(out)["datasets"][0]["buckets"]
    assert sorted(row["bucket"] for row in rows for _ in range(row["images"])) == sorted(placed)
    _, out, _ = command_line("doctor", config, "--sd-scripts", root, "--arch", "krea2", "--quick", "--json")
    sections = json.loads(out)["sections"]
    (facts,) = [{f["name"]: f["text"] for f in s["facts"]} for s in sections if s["title"] == "latent caches"]
    assert facts["krea2"].startswith("1 of 4 latents are there; to encode ")
    assert "own-family" in {finding["code"] for section in sections for finding in section["findings"]}
    code, _, said = command_line("plan", config, "--arch", "krea2")
    assert code == 2
    assert "with --sd-scripts, the folder of its checkout" in said
