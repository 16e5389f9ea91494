"""The adapter's hold on the real sd-scripts: by subject whole or not at all, on checked names, in every trainer."""

import ast
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from renaming import names_of, unseen, with_other_behaviour

HERE = Path(__file__).parent
ADAPTER = HERE.parent / "kohya_bucket" / "trainers" / "sdscripts"

COMMANDS = {
    "plan.py",
    "wanted_latents.py",
    "doctor.py",
    "cache_doctor.py",
    "checkout.py",
}  # have none of sd-scripts' objects
# Names of sd-scripts that the adapter's code also uses, for things of its own.
OF_OUR_OWN = {
    "image", "size", "subsets", "random_crop", "color_aug", "cumsum",
    "register_image",  # only tells sd-scripts' datasets from those of others
    "cache_text_encoder_outputs",  # the trainers' option; datasets up to 0.10 have a method of that name
}  # fmt: skip


def owners(sd):
    from kohya_bucket.trainers.door.seams import Owners
    from kohya_bucket.trainers.sdscripts.door import SdScriptsDoor

    door = SdScriptsDoor()
    return Owners(door.package, door.home(), door.complete())


def seams(sd):
    from kohya_bucket.trainers.sdscripts.seams import SUBJECTS

    found = owners(sd)
    return [(subject, seam) for subject in SUBJECTS for seam in subject.seams_of(found)]


def test_every_seam_is_there(unpatched):
    found = owners(unpatched)
    assert [f"{seam.path} {found.problem(seam)}" for _, seam in seams(unpatched) if found.problem(seam)] == []


def test_no_module_keeps_an_original(unpatched):
    from kohya_bucket.trainers import sdscripts

    found = owners(unpatched)
    trainer = importlib.import_module("train_network")  # has names of its own
    values = {seam.path: found.find(seam.path)[2] for _, seam in seams(unpatched) if seam.replaces}
    sdscripts.install(quiet=True)
    try:
        assert sdscripts.is_active()
        modules = [module for name, module in list(sys.modules.items()) if name.startswith("library.")] + [trainer]
        for module in modules:
            for name, bound in vars(module).items():
                assert not any(bound is value for value in values.values()), f"{module.__name__}.{name}"
        for path, value in values.items():
            assert found.find(path)[2] is not value, path
    finally:
        sdscripts.uninstall()
    for path, value in values.items():
        assert found.find(path)[2] is value, path


def test_every_name_that_the_code_uses_is_in_a_seam(unpatched):
    """What the adapter's code names, and sd-scripts' classes have, is checked; nothing else is used of them."""
    from kohya_bucket.trainers.door.shapes import attributes_of

    found = owners(unpatched)
    checked = {name for _, seam in seams(unpatched) for name in (*names_of(seam), *seam.only)}
    classes = (
        "ImageInfo", "DreamBoothSubset", "FineTuningSubset", "ControlNetSubset", "DreamBoothDataset",
        "FineTuningDataset", "ControlNetDataset", "DatasetGroup", "collator_class", "LatentsCachingStrategy",
        "TextEncoderOutputsCachingStrategy", "ConfigSanitizer",
    )  # fmt: skip
    theirs = {name for cls in classes if found.has(cls) for name in attributes_of(found.named(cls))}
    used = set()
    for file in [file for file in (*ADAPTER.glob("*.py"), *ADAPTER.glob("caching/*.py")) if file.name not in COMMANDS]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
    unchecked = {name for name in used & theirs - checked - OF_OUR_OWN if not name.startswith("__")}
    since = {
        "caption_dropout_rate",
        "resize_interpolation",
        "caching_mode",
        "text_encoder_outputs_npz",
    }  # checked where a version has them
    assert used
    assert unchecked - since == set()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each change is tried in a fork")
def test_nothing_can_change_unseen(unpatched, sd_scripts_dir, tmp_path):
    """Each name that the adapter relies on, renamed in a copy of the checkout, and each parameter more, is noticed."""
    tried, missed = unseen("sdscripts", sd_scripts_dir, tmp_path)
    assert tried > 100
    assert missed == []


FIND = """
modules = [module for name, module in list(sys.modules.items()) if name.startswith("library.")]
manager = next(module.BucketManager for module in modules if hasattr(module, "BucketManager"))
"""
ROUNDED = """
manager.round_to_steps = lambda self, x: round(x / self.reso_steps) * self.reso_steps
"""
NEAREST_SIDE = """
chosen = manager.select_bucket
def select_bucket(self, image_width, image_height):
    return chosen(self, image_width // 8 * 8, image_height // 8 * 8)
manager.select_bucket = select_bucket
"""
OTHER_FILTER = """
import types
import cv2
from library import train_util, utils
utils.get_cv2_interpolation = lambda name: cv2.INTER_LINEAR
# the trainer's own cv2, not the one that the adapter compares with
train_util.cv2 = types.SimpleNamespace(**{**vars(cv2), "INTER_AREA": cv2.INTER_LINEAR})
"""


@pytest.mark.parametrize("change", [FIND + ROUNDED, FIND + NEAREST_SIDE])
def test_other_buckets_of_the_same_names_are_noticed(unpatched, sd_scripts_dir, change):
    found = with_other_behaviour("sdscripts", sd_scripts_dir, change)
    assert not found["active"]
    assert "BucketManager makes ((" in found["why"]


def test_other_pixels_of_the_same_names_are_noticed(unpatched, sd_scripts_dir):
    found = with_other_behaviour("sdscripts", sd_scripts_dir, OTHER_FILTER)
    assert found["active"]
    assert list(found["left_alone"]) == ["caching"]
    assert "trim_and_resize_if_required makes pixels" in found["left_alone"]["caching"]


def trainers(root):
    """Programs that load a dataset group: those which hand one to a loader, and those that are built on them."""
    files = {}
    for file in sorted(root.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "DataLoader(" in text or "NetworkTrainer" in text or "TextualInversionTrainer" in text:
            files[file.name] = "library" in text
    return [name for name, ours in files.items() if ours]


START = """
import importlib.util, json, sys
sys.dont_write_bytecode = True
import kohya_bucket.trainers.sdscripts as kb
kb.install(quiet=True)
names = json.loads(sys.argv[2])
import os
for name in names:
    child = os.fork()
    if not child:
        sys.path.insert(0, sys.argv[1])
        try:
            import runpy
            space = runpy.run_path(os.path.join(sys.argv[1], name), run_name="a_trainer")
            from torch.utils.data import ConcatDataset, DataLoader
            print(json.dumps([name, kb.is_active(), kb.why_inactive(), ""]), flush=True)
        except BaseException as error:
            print(json.dumps([name, kb.is_active(), kb.why_inactive(), f"{type(error).__name__}: {error}"]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each trainer is started in a fork")
def test_every_trainer_finds_the_adapter_in_place(unpatched, sd_scripts_dir):
    """Whatever a trainer imports, once it has, the adapter is in: before it reads its arguments."""
    names = trainers(sd_scripts_dir)
    assert {"train_network.py", "train_db.py", "fine_tune.py", "sdxl_train.py"} <= set(names)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    prelude = "import torch, transformers, diffusers, accelerate, cv2, torchvision\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prelude + START, str(sd_scripts_dir), json.dumps(names)],
        env=environment, capture_output=True, text=True, check=False, cwd=sd_scripts_dir,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [answer[0] for answer in answers] == names, done.stderr[-2000:]
    missing = [answer for answer in answers if not answer[1] and "ModuleNotFoundError" not in answer[3]
               and "ImportError" not in answer[3]]  # fmt: skip
    assert missing == []
    assert sum(answer[1] for answer in answers) >= len(answers) - 4, answers


def without(sd, path):
    """sd-scripts' modules with one name gone."""
    from kohya_bucket.trainers.door.patching import bindings_of

    owner, name, value = owners(sd).find(path)
    places = [(owner, name)]
    if isinstance(owner, types.ModuleType):
        places = list(bindings_of(value, lambda module: module.__name__.startswith("library.")))
    for at, bound in places:
        delattr(at, bound)

    def restore():
        for at, bound in places:
            setattr(at, bound, value)

    return restore


@pytest.mark.parametrize("path", ["LatentsCachingStrategy.get_strategy", "BaseDataset.new_cache_latents"])
def test_unknown_caching_leaves_the_order_of_epochs(unpatched, path, monkeypatch, capsys):
    from kohya_bucket.trainers import sdscripts

    restore = without(unpatched, path)
    try:
        sdscripts.install()
        assert sdscripts.is_active()
        assert path in sdscripts.left_alone()["caching"]
        sanitizer = unpatched.config_util.ConfigSanitizer(True, True, True, True)
        config = {"datasets": [{"resolution": 128, "subsets": [{"image_dir": "x", "num_repeats": 1}]}]}
        sanitizer.sanitize_user_config(dict(config))
        with pytest.raises(SystemExit) as error:
            sanitizer.sanitize_user_config({**config, "kohya_bucket": {"latent_cache": "shards"}})
        assert "latent_cache = 'shards' needs a part of sd-scripts" in str(error.value)
        assert path in str(error.value)
        monkeypatch.setattr(sys, "argv", ["train.py", "--cache_latents"])
        with pytest.raises(SystemExit, match="--cache_latents with several sizes"):
            sanitizer.sanitize_user_config({**config, "kohya_bucket": {"resolutions": [128, 64]}})
    finally:
        sdscripts.uninstall()
        restore()


@pytest.mark.parametrize("option", ["--resume", "--initial_step"])
def test_unknown_resuming_refuses_what_needs_it(unpatched, option, monkeypatch, tmp_path):
    from kohya_bucket.trainers import sdscripts

    restore = without(unpatched, "prepare_accelerator")
    try:
        sdscripts.install(quiet=True)
        assert sdscripts.is_active()
        assert set(sdscripts.left_alone()) == {"resuming"}
        sdscripts.uninstall()
        monkeypatch.setattr(sys, "argv", ["train.py", option, "5"])
        with pytest.raises(SystemExit, match=f"{option} needs a part of sd-scripts"):
            sdscripts.install(quiet=True)
        sdscripts.uninstall()
        (tmp_path / "args.toml").write_text("[training]\nresume = 'state'\nsave_state = true\n", encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["train.py", f"--config_file={tmp_path / 'args'}"])
        with pytest.raises(SystemExit, match="--resume needs a part of sd-scripts"):
            sdscripts.install(quiet=True)
    finally:
        sdscripts.uninstall()
        restore()


def test_an_order_that_looks_unknown_is_no_order(unpatched):
    from kohya_bucket.errors import KohyaBucketError
    from kohya_bucket.trainers import sdscripts

    restore = without(unpatched, "BaseDataset.shuffle_buckets")
    try:
        with pytest.raises(KohyaBucketError, match="shuffle_buckets does not exist"):
            sdscripts.install()
        assert not sdscripts.is_active()
    finally:
        sdscripts.uninstall()
        restore()
