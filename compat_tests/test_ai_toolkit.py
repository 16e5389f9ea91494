"""Epochs of ai-toolkit's own loader, with and without the plan: every batch is written down.

Set AI_TOOLKIT_DIR to a checkout; its loader and datasets run unmodified, without a model.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rank_processes import run_ranks
from renaming import unseen, with_other_behaviour
from safetensors.numpy import save_file

from kohya_bucket.originals.loaders import run_loader
from kohya_bucket.trainers.ai_toolkit.architectures import STEPS
from kohya_bucket.trainers.ai_toolkit.companions import companions_of
from kohya_bucket.trainers.ai_toolkit.config import KEYS, OTHER_KEYS, read_job
from kohya_bucket.trainers.ai_toolkit.controls import RAW
from kohya_bucket.trainers.ai_toolkit.plan import overview, plan_of

CHECKOUT = os.environ["AI_TOOLKIT_DIR"]
SCRIPT = Path(__file__).with_name("ai_toolkit_script.py")
COUNT, BATCH = 37, 4


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Most in a few sizes, some in sizes of their own."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    usual = [(192, 128), (128, 192), (160, 160)]
    for i in range(COUNT):
        size = usual[i % 3] if i % 2 else tuple(int(side) for side in rng.integers(90, 280, 2))
        Image.fromarray(rng.integers(0, 255, (*size[::-1], 3), dtype=np.uint8)).save(folder / f"{i:02d}.png")
    return folder


def run(out, datasets, steps, ranks=1, code=0, **settings):
    """What each rank trained, and what the first one said."""
    out.mkdir(exist_ok=True)
    settings = {
        "out": str(out),
        "datasets": datasets,
        "batch_size": BATCH,
        "steps": steps,
        "job": {},
        "seed": 7,
        **settings,
    }
    file = out / "settings.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    for log in out.glob("rank*.jsonl"):
        log.unlink()
    codes, said = run_ranks([sys.executable, str(SCRIPT), str(file)], ranks, out, out)
    assert codes == [code] * ranks, said[0][-3000:]
    logs = [(out / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines() for rank in range(ranks)]
    return [[json.loads(line) for line in log] for log in logs], said[0]


def data(folder, resolution=128, **keys):
    return {"folder_path": str(folder), "resolution": resolution, "num_workers": 0, **keys}


def counts(rows, epoch, loader="main"):
    return Counter(
        tuple(item) for row in rows if (row["epoch"], row["loader"]) == (epoch, loader) for item in row["items"]
    )


def steps_of(pictures, tmp_path, *datasets, **settings):
    """Batches of an epoch."""
    (rows,), _ = run(tmp_path / "one", list(datasets), 1, **settings)
    return rows[0]["length"]


def test_alone_it_fills_slots_with_repeats(pictures, tmp_path):
    steps = steps_of(pictures, tmp_path, data(pictures), plan=False)
    (rows,), _ = run(tmp_path / "out", [data(pictures)], 2 * steps, plan=False)
    seen = counts(rows, 0)
    assert len(seen) == COUNT
    assert sum(seen.values()) > COUNT * 1.2
    batches = [{tuple(sorted(map(tuple, r["items"]))) for r in rows if r["epoch"] == epoch} for epoch in (0, 1)]
    assert batches[0] == batches[1]
    with_sizes = {item[1]: tuple(row["shape"][-2:]) for row in rows for item in row["items"]}
    ids = np.unique(list(with_sizes.values()), axis=0, return_inverse=True)[1].reshape(-1)
    restated = run_loader("ai-toolkit", ids, np.ones(len(ids)), BATCH)
    assert (restated.steps, restated.repeated) == (steps, sum(seen.values()) - COUNT)


def test_captions_in_another_encoding(pictures, tmp_path):
    folder = tmp_path / "pictures"
    shutil.copytree(pictures, folder)
    (folder / "03.txt").write_bytes(b"caf\xe9")
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps({str(folder / "03.png"): {}}), encoding="utf-8")
    for source in (data(folder), data(listed)):
        assert "UnicodeDecodeError" in run(tmp_path / "alone", [source], 37, plan=False, code=1)[1]
        with pytest.raises(FileNotFoundError):  # no batch was made
            run(tmp_path / "out", [data(pictures), source], 1, code=2)
    said = (tmp_path / "out" / "said0.txt").read_text(encoding="utf-8")
    assert "1 caption file not in UTF-8, at which ai-toolkit stops" in said
    assert f"`kohya-bucket fix {folder}` writes them as UTF-8" in said


@pytest.mark.parametrize("workers", [0, 2])
def test_every_image_once_in_each_epoch(pictures, tmp_path, workers):
    steps = steps_of(pictures, tmp_path, data(pictures))
    (rows,), said = run(tmp_path / "out", [data(pictures, num_workers=workers)], 3 * steps)
    for epoch in range(3):
        assert len(counts(rows, epoch)) == COUNT
        assert set(counts(rows, epoch).values()) == {1}
        assert f"epoch {epoch + 1}: {COUNT} images, 0 missed, 0 repeated" in said
    first = [sorted(map(tuple, row["items"])) for row in rows if row["epoch"] == 0]
    assert first != [sorted(map(tuple, row["items"])) for row in rows if row["epoch"] == 1]
    for row in rows:
        assert row["shape"][0] == len(row["items"])


def with_controls(pictures, tmp_path, equal):
    """Two folders of control images: of most pictures one or two, of some none; of three sizes, or all `equal`."""
    draws = np.random.default_rng(1)
    folders = [tmp_path / "control1", tmp_path / "control2"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    for picture in sorted(pictures.glob("*.png")):
        for folder in folders[: draws.choice(3, p=[0.1, 0.4, 0.5])]:
            width, height = (64, 64) if equal else draws.choice([(64, 64), (96, 64), (64, 96)])
            Image.new("RGB", (int(width), int(height))).save(folder / picture.name)
    return data(pictures, control_path=[str(folder) for folder in folders])


@pytest.mark.parametrize(
    ("arch", "equal"), [("flux_kontext", False), ("qwen_image_edit_plus", False), ("flux2", True), ("krea2", False)]
)
def test_control_images_are_alike_in_each_batch(pictures, tmp_path, arch, equal):
    """Alone it ends at the first batch that mixes them; with the plan each item is trained once."""
    datasets = [with_controls(pictures, tmp_path, equal)]
    settings = {"arch": arch, "step": STEPS[arch], "raw_controls": arch != "flux_kontext"}
    said = run(tmp_path / "alone", datasets, 60, plan=False, code=1, **settings)[1]
    assert "ensors must" in said or "missing for" in said, said[-2000:]
    steps = steps_of(pictures, tmp_path, *datasets, **settings)
    (rows,), _ = run(tmp_path / "out", datasets, steps, **settings)
    assert len(counts(rows, 0)) == COUNT
    assert set(counts(rows, 0).values()) == {1}
    seen = Counter()
    for row in rows:
        several = [[len(shapes)] for shapes in row["controls"]]
        if not (arch == "krea2" and several and several[0][0] > 1):
            several = [[shape[:-3:-1] for shape in shapes] for shapes in row["controls"]]
        assert all(one == several[0] for one in several), row
        seen[(*row["shape"][:-3:-1], str([list(one) for one in several[:1]]))] += len(row["items"])
    assert max(len(row["items"]) for row in rows) > 1
    model = {"arch": arch, "model_kwargs": {"edit": True}}
    process = {"type": "sd_trainer", "datasets": datasets, "train": {"batch_size": BATCH}, "model": model}
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"job": "extension", "config": {"name": "x", "process": [process]}}), encoding="utf-8")
    (planned,) = plan_of(read_job(file), [1], None, images=False).datasets
    shown = Counter()
    for bucket in planned.entry["buckets"]:
        controls = [list(one) for one in bucket.get("controls", ())]
        controls = controls[0] if controls and len(controls[0]) == 1 else controls
        shown[(*bucket["bucket"], str([controls] if controls else []))] += bucket["samples"]
    assert seen == shown


def test_workers_change_nothing(pictures, tmp_path):
    found = [run(tmp_path / f"{n}", [data(pictures, num_workers=n)], 30)[0] for n in (0, 2)]
    assert found[0] == found[1]


def test_repeats_flips_and_several_resolutions(pictures, tmp_path):
    datasets = [data(pictures, 128, num_repeats=3, batch_size=3), data(pictures, 96, flip_x=True)]
    steps = steps_of(pictures, tmp_path, *datasets)
    (rows,), _ = run(tmp_path / "out", datasets, steps)
    seen = counts(rows, 0)
    assert {key: n for key, n in seen.items() if key[0] == 128} == {
        (128, f"{i:02d}.png", False, False): 3 for i in range(COUNT)
    }
    assert {key[1:] for key in seen if key[0] == 96} == {
        (f"{i:02d}.png", flip, False) for i in range(COUNT) for flip in (0, 1)
    }
    assert {n for key, n in seen.items() if key[0] == 96} == {1}
    sizes = {row["items"][0][0]: 0 for row in rows}
    for row in rows:
        if row["items"][0][0] == 96:  # a bucket of two images that are trained three times has to
            assert len({tuple(item) for item in row["items"]}) == len(row["items"])
        sizes[row["items"][0][0]] = max(sizes[row["items"][0][0]], len(row["items"]))
    assert sizes == {128: 3, 96: BATCH}


def test_merged_buckets_make_fewer_steps(pictures, tmp_path):
    job = {"kohya_bucket": {"remainder": "merge", "merge_max_crop": 0.4}}
    plain = steps_of(pictures, tmp_path, data(pictures))
    steps = steps_of(pictures, tmp_path, data(pictures), job=job)
    assert steps < plain
    (rows,), _ = run(tmp_path / "out", [data(pictures)], steps, job=job)
    assert set(counts(rows, 0).values()) == {1}
    assert len(counts(rows, 0)) == COUNT


def test_options_that_cannot_be_had_end_the_run(pictures, tmp_path):
    with pytest.raises(AssertionError, match="focus is set, but images are placed, cut"):
        run(tmp_path / "out", [data(pictures)], 1, job={"kohya_bucket": {"focus": "beside"}})


def test_ranks_share_the_images(pictures, tmp_path):
    steps = run(tmp_path / "one", [data(pictures)], 1, ranks=2)[0][0][0]["length"]
    ranks, _ = run(tmp_path / "out", [data(pictures)], 2 * steps, ranks=2)
    for epoch in (0, 1):
        together = counts(ranks[0], epoch) + counts(ranks[1], epoch)
        assert len(together) == COUNT
        shapes = [[row["shape"][2:] for row in rows if row["epoch"] == epoch] for rows in ranks]
        assert len(shapes[0]) == len(shapes[1]) == steps
    assert sum(together.values()) - COUNT <= steps  # a short step repeats an image, so that no rank is empty


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed_in_the_middle_of_an_epoch(pictures, tmp_path, ranks):
    steps = run(tmp_path / "one", [data(pictures)], 1, ranks=ranks)[0][0][0]["length"]
    stop = steps + steps // 2
    whole, _ = run(tmp_path / "whole", [data(pictures)], 3 * steps, ranks=ranks)
    before, _ = run(tmp_path / "out", [data(pictures, num_workers=2)], stop + 1, ranks=ranks, save_at=stop)
    after, said = run(tmp_path / "out", [data(pictures)], 3 * steps - stop, ranks=ranks, resume=True, seed=8)
    assert f"going on with batch {steps // 2 + 1} of epoch 2" in said
    for all_of_it, first, rest in zip(whole, before, after, strict=True):
        assert [row["items"] for row in first[:stop] + rest] == [row["items"] for row in all_of_it]


def is_large(row):
    return row["shape"][-1] * row["shape"][-2] > 110**2


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_resolution_after_another(pictures, tmp_path, ranks):
    """Which `resolution: [96, 128]` makes datasets of; a run that is killed at the switch goes on behind it."""
    table = {"resolution_mode": "schedule", "resolution_epochs": [2]}
    more = {"job": {"kohya_bucket": table}, "ranks": ranks}
    datasets = [data(pictures, 96), data(pictures, 128)]
    steps = run(tmp_path / "one", datasets, 1, **more)[0][0][0]["length"]
    stop = 2 * steps - 1
    whole, _ = run(tmp_path / "whole", datasets, 4 * steps, **more)
    before, _ = run(tmp_path / "out", datasets, stop + 1, save_at=stop, **more)
    after, said = run(tmp_path / "out", datasets, 4 * steps - stop, resume=True, seed=8, **more)
    assert f"going on with batch {steps} of epoch 2" in said
    if ranks == 2:  # behind the switch on another number of processes
        (alone,), _ = run(tmp_path / "out", datasets, 2 * steps, resume=True, **(more | {"ranks": 1}))
        behind = [is_large(row) for row in alone].index(True)
        assert all(map(is_large, alone[behind:]))
        assert max(Counter(item[1] for row in alone[behind:] for item in row["items"]).values()) == 1
    for epoch, side in enumerate([96, 96, 128, 128]):
        rows = [row for rank in whole for row in rank if row["epoch"] == epoch]
        seen = Counter(item[1] for row in rows for item in row["items"])
        assert len(seen) == COUNT
        assert sum(seen.values()) - COUNT < ranks
        assert {is_large(row) for row in rows} == {side == 128}
    for all_of_it, first, rest in zip(whole, before, after, strict=True):
        assert [row["items"] for row in first[:stop] + rest] == [row["items"] for row in all_of_it]


def test_regularization_images_go_on_too(pictures, tmp_path):
    reg = {"datasets_reg": [data(pictures, 96)]}
    whole, _ = run(tmp_path / "whole", [data(pictures)], 40, **reg)
    run(tmp_path / "out", [data(pictures)], 23, save_at=23, **reg)
    after, _ = run(tmp_path / "out", [data(pictures)], 17, resume=True, seed=8, **reg)
    assert [row["items"] for row in after[0]] == [row["items"] for row in whole[0][23:]]


def test_other_images_begin_the_epoch_anew(pictures, tmp_path):
    run(tmp_path / "out", [data(pictures)], 5, save_at=5)
    _, said = run(tmp_path / "out", [data(pictures, 96)], 1, resume=True)
    assert "changed since the checkpoint was saved" in said
    assert "the epoch starts again from its first image" in said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each change is tried in a fork")
def test_nothing_can_change_unseen(tmp_path):
    """Each name that the adapter relies on, renamed in a copy of the checkout, and each parameter more, is noticed."""
    tried, missed = unseen("ai_toolkit", Path(CHECKOUT), tmp_path)
    assert tried > 30
    assert missed == []


OTHER_BUCKETS = """
from kohya_bucket.trainers.door.patching import bindings_of
from toolkit import buckets
chosen = buckets.get_bucket_for_image_size
def get_bucket_for_image_size(width, height, resolution=512, divisibility=8):
    return chosen(width + 16, height, resolution, divisibility)
for module, name in list(bindings_of(chosen, lambda module: module.__name__.startswith("toolkit"))):
    setattr(module, name, get_bucket_for_image_size)
"""


@pytest.mark.parametrize("change", ["", OTHER_BUCKETS])
def test_other_buckets_of_the_same_names_are_noticed(change):
    found = with_other_behaviour("ai_toolkit", Path(CHECKOUT), change)
    assert found["active"]
    assert list(found["left_alone"]) == (["planning"] if change else [])


@pytest.fixture(scope="module")
def some_turned(pictures, tmp_path_factory):
    """The same, of which EXIF asks to turn each third by a quarter."""
    folder, exif = tmp_path_factory.mktemp("turned"), Image.Exif()
    exif[0x0112] = 6
    for i, path in enumerate(sorted(pictures.glob("*.png"))):
        with Image.open(path) as image:
            image.save(folder / path.name, exif=exif if i % 3 == 0 else None)
    return folder


@pytest.mark.parametrize(("ranks", "keys"), [
    (1, [{"resolution": [128, 96], "num_repeats": 2}]), (1, [{"flip_x": True, "flip_y": True}, {"square_crop": True}]),
    (2, [{"resolution": 128, "scale": 0.8, "batch_size": 3}]), (1, [{"resolution": 128, "fast_image_size": True}]),
    (1, [{"resolution": 128, "fast_image_size": True, "folder_path": "anew"}]),
])  # fmt: skip
def test_plan_shows_what_its_loader_trains(some_turned, tmp_path, ranks, keys):
    """Sizes that it has kept in the folder count for the next run, whatever `fast_image_size` says then."""
    if "folder_path" in keys[0]:
        shutil.copytree(some_turned, tmp_path / "anew", ignore=shutil.ignore_patterns(".*"))
        keys = [{**keys[0], "folder_path": str(tmp_path / "anew")}]
    listed = [{"folder_path": str(some_turned), "resolution": 128, **one} for one in keys]
    process = {"datasets": listed, "train": {"batch_size": BATCH}, "model": {"arch": "zimage"}}
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"job": "extension", "config": {"name": "x", "process": [process]}}), encoding="utf-8")
    (data,) = [overview(read_job(file), [ranks])]
    split = [{**one, "resolution": r} for one in listed
             for r in (one["resolution"] if isinstance(one["resolution"], list) else [one["resolution"]])]  # fmt: skip
    steps = data.gpus[0].steps
    logs, _ = run(tmp_path / "out", [{"num_workers": 0, **one} for one in split], steps, ranks)
    assert {row["length"] for rows in logs for row in rows} == {steps}
    seen = Counter()
    for row in (row for rows in logs for row in rows):
        for item in row["items"]:
            seen[(item[0], *row["shape"][:-3:-1])] += 1  # resolution, width, height
    shown = Counter()
    for one in data.datasets:
        for row in one.rows:
            shown[(one.keys.resolution, *row.bucket[:2])] += row.samples
    assert seen == shown


def test_the_keys_of_a_data_set_are_all_known():
    source = Path(CHECKOUT, "toolkit", "config_modules.py").read_text(encoding="utf-8")
    cls = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "DatasetConfig")
    calls = (n for n in ast.walk(cls) if isinstance(n, ast.Call) and ast.unparse(n.func) == "kwargs.get")
    asked = {ast.literal_eval(call.args[0]) for call in calls}
    assert asked == OTHER_KEYS | KEYS.keys()


def test_the_step_of_every_model_is_known():
    """Of each class with an `arch`, what its `get_bucket_divisibility` returns, of constants in its own code."""
    files = [p for folder in ("toolkit/models", "extensions_built_in") for p in Path(CHECKOUT, folder).rglob("*.py")]
    sources = [p.read_text(encoding="utf-8") for p in [*files, Path(CHECKOUT, "toolkit/stable_diffusion_model.py")]]
    sources = [text for text in sources if "class " in text]  # others are prompts, of which one is no Python
    classes = {n.name: n for text in sources for n in ast.parse(text).body if isinstance(n, ast.ClassDef)}
    found, raw = {}, set()
    for cls in classes.values():
        arch = next((n.value.value for n in cls.body if isinstance(n, ast.Assign)
                     and ast.unparse(n.targets[0]) == "arch" and isinstance(n.value, ast.Constant)), None)  # fmt: skip
        if isinstance(arch, str) and cls.name != "ExampleModel" and not arch.startswith("ace_step"):
            found[arch] = _step_of(cls, classes)
            if any(ast.unparse(n.targets[0]) == "self.use_raw_control_images" and ast.unparse(n.value) != "False"
                   for one in _line_of(cls, classes) for n in ast.walk(one) if isinstance(n, ast.Assign)):  # fmt: skip
                raw.add(arch)
    legacy = {name: _step_of(classes["StableDiffusion"], classes, is_flux=name == "flux", is_v3=name == "sd3")
              for name in _legacy_names()}  # fmt: skip
    assert found | legacy | {"flex1": legacy["flux"]} == STEPS
    assert raw - {"mageflow"} == RAW  # which stands under "if it edits" in the class of both


def _legacy_names():
    source = Path(CHECKOUT, "toolkit", "config_modules.py").read_text(encoding="utf-8")
    literal = next(n.value for n in ast.parse(source).body
                   if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "ModelArch")  # fmt: skip
    names = [one.value for one in literal.slice.elts]
    return [name for name in names if name not in ("flex1", "flex2", "wan21", "anima")]


def _line_of(cls, classes):
    line = [cls]
    while (base := next((b.id for b in line[-1].bases if isinstance(b, ast.Name)), None)) in classes:
        line.append(classes[base])
    return line


def _step_of(cls, classes, **flags):
    line = _line_of(cls, classes)
    numbers = {"is_flux": False, "is_v3": False, **flags}
    for node in (n for one in reversed(line) for n in ast.walk(one) if isinstance(n, ast.Assign)):
        name = ast.unparse(node.targets[0])
        if name in ("self.patch_size", "self.vae_scale_factor"):
            constant = isinstance(node.value, ast.Constant)
            numbers[name.removeprefix("self.")] = node.value.value if constant else 2  # Krea's stands in a table
    method = next(n for one in line for n in one.body if getattr(n, "name", "") == "get_bucket_divisibility")
    space = {}
    exec(compile(ast.Module([method], []), "", "exec"), space)
    vae = SimpleNamespace(config={"block_out_channels": [1, 2, 4, 4]})
    return space["get_bucket_divisibility"](SimpleNamespace(vae=vae, **numbers))


def test_latents_of_other_files_are_made_anew(pictures, tmp_path):
    """Without a model: which file each image's latents are looked for in, and written to."""
    folder = tmp_path / "own"
    shutil.copytree(pictures, folder)

    def named(**how):
        _, said = run(tmp_path / "out", [data(folder)], 1, latent_names=True, **how)
        return json.loads(next(line for line in said.splitlines() if line.startswith("{"))), said

    alone, first = named(plan=False)[0], named()[0]
    assert alone == first
    for name in first.values():
        Path(name).parent.mkdir(exist_ok=True)
        save_file({"latent": np.zeros(4, np.float32)}, name)  # which says nothing of an image
    second, said = named()
    assert not set(first.values()) & set(second.values())
    assert f"what was cached of {COUNT} items was made of other files" in said
    assert named(plan=False)[0] == first
    assert all(Path(name).is_file() for name in first.values())


def test_what_an_image_encoder_sees_is_of_the_picture_as_it_is(pictures, tmp_path):
    """Of those that `cache_clip_vision_to_disk` keeps, by the names of files alone."""
    folder = tmp_path / "own"
    shutil.copytree(pictures, folder)
    keys = {"clip_image_path": str(folder), "cache_clip_vision_to_disk": True}

    def trained():
        _, said = run(tmp_path / "out", [data(folder, **keys)], 1, vision=True)
        return json.loads(next(line for line in said.splitlines() if line.startswith('{"seen')))

    def exchange():
        for source, target in (("00", "x"), ("01", "00"), ("x", "01")):
            (folder / f"{source}.png").rename(folder / f"{target}.png")

    first = trained()
    assert first["encoded"] == COUNT + 1  # and one of no picture
    exchange()
    second = trained()
    assert second["encoded"] == 2
    names = sorted(first["seen"])
    assert [second["seen"][name] for name in names] == [
        first["seen"][name] for name in ["01.png", "00.png", *names[2:]]
    ]
    assert trained() == {**second, "encoded": 0}


def test_a_cache_that_grows_is_named(pictures, tmp_path):
    _, said = run(tmp_path / "out", [data(pictures, random_crop=True)], 1, latent_names=True)
    assert "the cache grows with every run" in said


def test_a_vae_of_clips_encodes_pictures_in_2d(pictures, tmp_path):
    """Another computation, whose result differs by less than the rounding of the type that it is done in."""

    def latent(dtype, **how):
        _, said = run(tmp_path / "out", [data(pictures)], 1, latent_names=True, vae=dtype, **how)
        return np.array(json.loads(next(line for line in said.splitlines() if line.startswith("["))))

    exact, rounded = latent("float32", plan=False), latent("bfloat16", plan=False)
    folded, folded_rounded = latent("float32"), latent("bfloat16")
    assert 0 < np.abs(folded - exact).max() < 1e-5 * np.abs(exact).max()
    assert np.abs(folded_rounded - rounded).mean() < np.abs(rounded - exact).mean()


_COMPANIONS = """
import json, os, random, sys
sys.path.insert(0, os.environ["AI_TOOLKIT_DIR"])
from types import SimpleNamespace
from absent_packages import pass_over_absent
pass_over_absent()
from toolkit import dataloader_mixins as mixins
from toolkit.config_modules import DatasetConfig
CLASSES = {"control_path": "ControlFileItemDTOMixin", "mask_path": "MaskFileItemDTOMixin",
           "inpaint_path": "InpaintControlFileItemDTOMixin", "clip_image_path": "ClipImageFileItemDTOMixin",
           "unconditional_path": "UnconditionalFileItemDTOMixin"}
HAS = {"control_path": "has_control_image", "mask_path": "has_mask_image", "inpaint_path": "has_inpaint_image",
       "clip_image_path": "has_clip_image", "unconditional_path": "has_unconditional"}
class Base:
    def __init__(self, dataset_config, **keys): self.dataset_config = dataset_config
    def __getattr__(self, name): return lambda *args: None
model, out = SimpleNamespace(adapter=None, use_raw_control_images=False), {}
for key, images, folder in json.load(open(sys.argv[1])):
    kind = type(key, (getattr(mixins, CLASSES[key]), Base), {"dataloader_transforms": None})
    config = DatasetConfig(folder_path=".", **{key: folder})
    items = [(i, kind(path=i, dataset_config=config, sd=model)) for i in images]
    out.setdefault(key, []).append([i for i, item in items if not getattr(item, HAS[key])])
print("FOUND" + json.dumps(out))
"""


def test_companions_are_those_that_its_own_items_find(tmp_path):
    """Control and inpaint images, masks and the others, in 40 made-up folders for each key."""
    draws, cases = np.random.default_rng(0), []
    for number in range(200):
        key = ("control_path", "mask_path", "inpaint_path", "clip_image_path", "unconditional_path")[number % 5]
        folder = tmp_path / str(number)
        folder.mkdir()
        for i in range(6):
            for ending in draws.choice([".png", ".jpg", ".webp", ".PNG", ".gif", ".bmp", ".jpeg"], draws.integers(3)):
                (folder / f"im.{i}{ending}").touch()
        cases.append([key, [f"/data/im.{i}.png" for i in range(6)], str(folder)])
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    command = [sys.executable, "-c", _COMPANIONS, str(tmp_path / "cases.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.rpartition("FOUND")[2])
    for key, found in theirs.items():
        own = [
            [image for image, file in zip(images, companions_of(images, folder, key), strict=True) if not file]
            for one, images, folder in cases if one == key
        ]  # fmt: skip
        assert own == found
        assert 20 < sum(map(len, found)) < 220
