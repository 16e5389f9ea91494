"""The reader of musubi-tuner's configs against its own ConfigSanitizer and BlueprintGenerator (MUSUBI_DIR)."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import toml

from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.findings import Severity
from kohya_bucket.trainers.musubi.config import read_config
from kohya_bucket.trainers.musubi.keys import CLIPS, DEPRECATED, GENERAL, IMAGES, SOURCES

HERE = Path(__file__).resolve().parent
REFUSED = {"unknown-key", "misplaced-key", "wrong-type", "not-a-table"}
VALUES = [
    1, 2, 0, -3, 30.0, 0.5, True, False, "text", ".txt", "", [1, 25], [960, 544], [960], [1.0, 2.0], [True, 4], [],
    ["a"], {"a": 1}, 512, [1, 2, 3],
]  # fmt: skip
MEANT = {
    "caption_extension": [".txt", "", ".caption"], "batch_size": [1, 4, 0], "num_repeats": [1, 3, 0],
    "resolution": [512, [960, 544]], "enable_bucket": [True, False], "bucket_no_upscale": [True, False],
    "cache_directory": ["c"], "control_directory": ["d"], "fp_latent_window_size": [9, 4], "image_directory": ["i"],
    "image_jsonl_file": ["i.jsonl"], "multiple_target": [True], "fp_1f_clean_indices": [[0], [0, 10]],
    "fp_1f_target_index": [1], "fp_1f_no_post": [True], "no_resize_control": [True],
    "control_resolution": [1024, [8, 9]],
    "video_directory": ["v"], "video_jsonl_file": ["v.jsonl"], "target_frames": [[1], [25, 1, 45]],
    "frame_extraction": ["head", "chunk", "slid"], "frame_stride": [1, 10], "frame_sample": [1, 4],
    "max_frames": [129, 81], "source_fps": [30.0, 23.976], "flux_kontext_no_resize_control": [True],
    "qwen_image_edit_no_resize_control": [False], "qwen_image_edit_control_resolution": [512, [512, 768]],
    "nonsense": [1], "resolutoin": [512],
}  # fmt: skip


def made_up(draws):
    """A config that may be meant well, or not at all."""

    def table(names, count):
        wrong = draws.random() < 0.3
        out = {}
        for name in draws.sample(names, min(count, len(names))):
            out[name] = draws.choice(VALUES if wrong and draws.random() < 0.3 else MEANT[name])
        return out

    def dataset():
        names, source = draws.choice([(list(IMAGES), "image_directory"), (list(CLIPS), "video_directory")])
        if draws.random() < 0.15:
            names = list(MEANT)
        else:
            names = [name for name in names if name != source] + draws.choice([[], list(DEPRECATED)[:1], []])
        return {**({source: "x"} if draws.random() < 0.9 else {}), **table(names, draws.randint(0, 6))}

    config = {"datasets": [dataset() for _ in range(draws.randint(1, 3))]}
    if draws.random() < 0.8:
        names = list(GENERAL) if draws.random() < 0.9 else list(MEANT)
        config["general"] = table(names, draws.randint(0, 4))
    if draws.random() < 0.05:
        config[draws.choice(["generall", "dataset", "network"])] = {}
    return config


@pytest.fixture(scope="module")
def source():
    path = Path(os.environ["MUSUBI_DIR"]).resolve() / "src"
    if not (path / "musubi_tuner" / "dataset" / "architectures.py").is_file():
        pytest.skip("versions before 0.3 have older keys for control images")
    pytest.importorskip("voluptuous")
    return path


def theirs(source, folder, configs):
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"configs": [str(c) for c in configs], "out": str(folder / "out.json")}))
    environment = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HERE / "musubi_config_script.py"), str(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


def mine(path):
    """Their parameters by my reader, and whether it says that they refuse the config."""
    try:
        read = read_config(path)
    except ConfigError as error:
        return str(error), True
    refused = [f for f in read.findings.of(Severity.ERROR) if f.code in REFUSED]
    return [dataclasses.asdict(keys) for keys in read.datasets], bool(refused)


@pytest.mark.slow
def test_made_up_configs(source, tmp_path, capsys):
    draws = random.Random(8)
    configs = [made_up(draws) for _ in range(1500)]
    files = []
    for i, config in enumerate(configs):
        files.append(tmp_path / f"{i}.{'json' if i % 3 == 0 else 'toml'}")
        files[-1].write_text((json if i % 3 == 0 else toml).dumps(config), encoding="utf-8")
    refused = equal = 0
    for config, file, expected in zip(configs, files, theirs(source, tmp_path, files), strict=True):
        found, stops = mine(file)
        assert stops == isinstance(expected, str), (config, expected, found)
        if stops:
            refused += 1
            continue
        equal += 1
        for one, other in zip(found, expected, strict=True):
            if not any(other.get(name) for name in SOURCES):
                continue  # which stops a little later there, and is an error of mine
            known = {name: value for name, value in other.items() if name in one}
            assert json.loads(json.dumps(one)) == known, config
            assert set(one) == set(known)
            assert other.keys() - one.keys() == {"images", "debug_dataset", "architecture"}
            assert other["images"] == ("image_directory" in one)
    assert min(refused, equal) > 300
    with capsys.disabled():
        print(f"\n{equal} configs read alike, {refused} refused alike")
