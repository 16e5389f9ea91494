"""`kohya-bucket doctor`: each thing that it is to find, and that it changes nothing."""

import json
import re
import shutil
import sys
from collections import namedtuple

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from kohya_bucket.buckets import KohyaBuckets
from kohya_bucket.cli import app
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.trainers.door import environment
from kohya_bucket.trainers.sdscripts.cache_doctor import human, nbytes_of

SIZES = [(300, 200), (200, 300), (256, 256), (400, 100), (90, 300), (300, 200), (310, 205)]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    images = tmp_path / "images"
    images.mkdir()
    for i, size in enumerate(SIZES):
        noise = np.random.default_rng(i).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(noise).save(images / f"{i}.png")
        (images / f"{i}.txt").write_text("caption", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return images


def write(folder, subset="", rest="", batch_size=2):
    file = folder.parent / "dataset.toml"
    file.write_text(
        f"{rest}\n[[datasets]]\nresolution = 256\nbatch_size = {batch_size}\nenable_bucket = true\n"
        f"min_bucket_reso = 128\n[[datasets.subsets]]\nimage_dir = '{folder}'\ncaption_extension = '.txt'\n{subset}\n",
        encoding="utf-8",
    )
    return file


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def findings(*arguments, code=0):
    """({code: finding}, {title: {name: text}})."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    sections = json.loads(result.stdout)["sections"]
    facts = {s["title"].split()[0]: {f["name"]: f["text"] for f in s["facts"]} for s in sections}
    return {f["code"]: f for s in sections for f in s["findings"]}, facts


def everything_in(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_a_healthy_data_set(folder):
    found, facts = findings(write(folder, batch_size=1))
    assert found == {}
    assert facts["config"]["dataset 1"] == "7 images in 5 buckets, 7 batches an epoch"
    assert facts["config"]["decoded"] == "7 images, 0 of them cannot be decoded"
    assert f"numpy {np.__version__}" in facts["this"]["packages"]
    assert "nothing found that would stop the training or harm it" in run(folder.parent / "dataset.toml").output


def test_nothing_on_disk_is_changed(folder):
    checkout = folder.parent / "checkout"
    (checkout / "library").mkdir(parents=True)
    for name in ("__init__", "train_util", "config_util", "strategy_base"):
        (checkout / "library" / f"{name}.py").write_text("x = 1\n", encoding="utf-8")
    config = write(folder, rest="[kohya_bucket]\nlatent_cache = 'shards'")
    before = everything_in(folder.parent)
    findings(config, "--sd-scripts", checkout, code=1)
    assert everything_in(folder.parent) == before


def test_pixels_that_are_cut_off_are_found_by_decoding(folder):
    cut = folder / "3.png"
    cut.write_bytes(cut.read_bytes()[:2000])
    found, _ = findings(write(folder), code=1)
    assert found["undecodable"]["severity"] == "warning"
    assert "left out" in found["undecodable"]["message"]
    stopping = findings(write(folder, rest="[kohya_bucket]\non_bad_image = 'stop'"), code=1)[0]
    assert stopping["undecodable"]["severity"] == "error"
    (name,) = found["undecodable"]["names"]
    assert name.startswith(f"{cut}: cannot be read as an image (")
    assert "truncated" in name
    assert findings(write(folder, batch_size=1), "--quick")[0] == {}


def test_an_image_that_only_another_dataset_leaves_out_is_decoded(folder):
    long = folder / "long.png"
    Image.new("RGB", (900, 40)).save(long)
    long.with_suffix(".txt").write_text("caption", encoding="utf-8")
    config = write(folder)
    second = config.read_text(encoding="utf-8").replace("enable_bucket", "bucket_no_upscale = true\nenable_bucket")
    config.write_text(config.read_text(encoding="utf-8") + second, encoding="utf-8")
    found, facts = findings(config, code=1)
    assert any(str(long) in name for name in found["left-out"]["names"])
    assert facts["config"]["decoded"].startswith(f"{len(SIZES) + 1} images, 0 of them")


def test_small_images_are_counted_and_not_complained_of(folder):
    config = write(folder, rest="[general]\nskip_image_resolution = 200", batch_size=1)
    found, facts = findings(config)
    assert found == {}
    text = "5 images in 3 buckets, 5 batches an epoch, 2 left out by skip_image_resolution"
    assert facts["config"]["dataset 1"] == text
    assert facts["config"]["decoded"].startswith("5 images")
    (folder / "0.png").write_bytes(b"")
    assert "unreadable-image" in findings(config)[0]


def test_the_config_is_read_for_a_version_as_plan_does(folder):
    config = write(folder, rest="[general]\nskip_image_resolution = 200")
    found, facts = findings(config, "--sd-scripts", "0.10.1", "--quick", code=1)
    assert "new in sd-scripts 0.10.2, and 0.10.1" in found["misplaced-key"]["message"]
    assert "sd-scripts" not in facts  # there is no checkout to look at
    assert "must be a version such as" in str(run(config, "--sd-scripts", folder, "--quick").exception)


def test_images_that_no_epoch_trains_are_named(folder):
    (lone := folder / "lone").mkdir()
    (folder / "0.png").rename(lone / "0.png")
    table = "[kohya_bucket]\nremainder = 'drop'"
    config = write(lone, rest=table)
    assert "never-trained" not in findings(config)[0]
    config = write(lone, rest=table + "\nsmall_buckets = 'drop'")
    found = findings(config, code=1)[0]["never-trained"]  # the only one, so that the training could not begin
    assert found["severity"] == "error"
    assert "1 image is never trained (0.png)" in found["message"]


def test_names_are_printed_as_they_are(folder):
    odd = folder / "[bold]x[red].png"
    (folder / "3.png").rename(odd)
    odd.write_bytes(odd.read_bytes()[:2000])
    assert "[bold]x[red].png" in run(write(folder)).output


def test_a_full_disk(folder, monkeypatch):
    config = write(folder)

    def free(nbytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(nbytes, 0, nbytes))

    free(10_000)
    found, _ = findings(config, code=1)
    assert "to write (by model family), 10.0 kB free" in found["disk-full"]["message"]
    assert 'latent_cache = "shards"' in found["disk-full"]["remedy"]
    free(200_000)  # 7 images of 256x256 / 16 x 4 B fit, four times as many bytes do not
    found, _ = findings(config)
    assert found["disk-full"]["severity"] == "warning"


@pytest.mark.long
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("format", ["npz", "shards"])
def test_the_room_that_is_foretold_is_what_files_take(folder, flip, mask, format):
    pytest.importorskip("torch", reason="torch is not installed")
    from kohya_bucket.latents import precompute_latents
    from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
    from tests.latents.stub_encoders import MeanEncoder, dataset_of

    images = sorted(folder.glob("*.png"))
    for path in images if mask else ():
        Image.new("RGBA", (640, 480), (90, 60, 30, 7)).save(path)
    dataset = dataset_of(images, area=(512, 512), min_size=256, max_size=1024, reso_steps=64)
    out = folder.parent / "out"
    output = NpzFiles("sd", out) if format == "npz" else out
    precompute_latents(dataset, MeanEncoder(), output, flip=flip, mask=mask)
    taken = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    encoding = EncodeOptions("", "float32", "latents", flip, mask, "auto", "")
    wanted = LatentItems.from_placement(images, dataset.sizes, dataset.placement, encoding, folder)
    foretold = nbytes_of(wanted, 4 / 64, npz=format == "npz")
    assert taken * 0.9 < foretold < taken * 1.1


@pytest.mark.long
def test_caches_that_are_there_and_those_that_are_not(folder):
    pytest.importorskip("torch", reason="torch is not installed")
    from kohya_bucket.latents import precompute_latents
    from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
    from tests.latents.stub_encoders import Images, MeanEncoder

    config, images = write(folder), sorted(folder.glob("*.png"))
    sizes = np.array(SIZES, dtype=np.int32)
    dataset = Images(images, sizes, KohyaBuckets((256, 256), 128, 1024, 64).place(sizes))
    precompute_latents(dataset, MeanEncoder(), NpzFiles("sdxl"))
    found, facts = findings(config)
    assert found.keys() == {"short-batches"}
    assert facts["latent"] == {"sdxl": "7 of 7 latents are there"}
    broken, gone = sorted(folder.glob("*_sdxl.npz"))[:2]
    broken.write_bytes(broken.read_bytes()[:500])
    gone.unlink()
    found, facts = findings(config)
    assert facts["latent"]["sdxl"].startswith("5 of 7 latents are there; to encode ")
    found, facts = findings(write(folder, subset="flip_aug = true"))
    assert facts["latent"]["sdxl"].startswith("0 of 7")

    store = folder / "kohya_bucket_latents"
    precompute_latents(dataset, MeanEncoder(), store, images_root=folder)
    found, facts = findings(write(folder, rest="[kohya_bucket]\nlatent_cache = 'shards'"))
    assert facts["latent"][str(store)] == "7 of 7 latents are there"


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.10.1", "0.11"])
def test_caches_of_every_version_count(folder, version):
    pytest.importorskip("torch", reason="torch is not installed")
    from kohya_bucket.latents import precompute_latents
    from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
    from tests.latents.stub_encoders import Images, MeanEncoder

    images, sizes = sorted(folder.glob("*.png")), np.array(SIZES, dtype=np.int32)
    config = write(folder)
    one = config.read_text(encoding="utf-8")
    config.write_text(one + one.replace("resolution = 256", "resolution = 320"), encoding="utf-8")
    for resolution, there in ((256, 7), (320, 14)):
        placement = KohyaBuckets((resolution, resolution), 128, 1024, 64).place(sizes)
        output = NpzFiles("sd", sd_scripts=version)
        precompute_latents(Images(images, sizes, placement), MeanEncoder(), output)
        _, facts = findings(config)
        assert facts["latent"]["sd"].startswith(f"{there} of 14 latents are there")
    assert len(list(folder.glob("*.npz"))) == 7


def test_images_that_two_data_sets_share_are_cached_once(folder):
    config = write(folder)
    before = findings(config)[1]["latent"]["room"]
    config.write_text(2 * config.read_text(encoding="utf-8"), encoding="utf-8")
    _, facts = findings(config)
    assert facts["config"]["dataset 2"] == facts["config"]["dataset 1"]
    assert facts["config"]["decoded"].startswith("7 images")
    assert facts["latent"]["room"].split(" to write")[0] == before.split(" to write")[0]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("collection", ["", "sdxl"])
def test_a_store_is_read_as_training_reads_it(folder, dtype, collection):
    """Training finds an item by its image and size, whatever folder the store's names start from."""
    pytest.importorskip("torch", reason="torch is not installed")
    from kohya_bucket.latents import precompute_latents
    from tests.latents.stub_encoders import Images, MeanEncoder

    images, sizes = sorted(folder.glob("*.png")), np.array(SIZES, dtype=np.int32)
    dataset = Images(images, sizes, KohyaBuckets((256, 256), 128, 1024, 64).place(sizes))
    store = folder / "kohya_bucket_latents"
    precompute_latents(dataset, MeanEncoder(), store, images_root=folder.parent, dtype=dtype, collection=collection)
    shards = write(folder, rest="[kohya_bucket]\nlatent_cache = 'shards'")
    assert findings(shards)[1]["latent"][str(store)] == "7 of 7 latents are there"
    shards.write_text(shards.read_text(encoding="utf-8").replace("= 128", "= 192"), encoding="utf-8")
    text = findings(shards)[1]["latent"][str(store)]
    assert re.fullmatch("[1-6] of 7 latents are there; to encode not encoded yet: [1-6]", text)
    (store / "store.json").write_text('{"format": "kohya_bucket.latents"', encoding="utf-8")
    assert "store.json cannot be read" in findings(shards, code=1)[0]["store"]["message"]


def test_a_file_where_the_store_belongs(folder):
    (folder.parent / "taken").write_text("", encoding="utf-8")
    taken = f"[kohya_bucket]\nlatent_cache = 'shards'\nlatent_cache_dir = '{folder.parent / 'taken'}'"
    assert "a file" in findings(write(folder, rest=taken), code=1)[0]["store"]["message"]


def test_no_pyarrow_for_shards(folder, monkeypatch):
    monkeypatch.setattr("kohya_bucket.trainers.sdscripts.cache_doctor.version_of", lambda _: "")
    found, _ = findings(write(folder, rest="[kohya_bucket]\nlatent_cache = 'shards'"), code=1)
    assert found["no-pyarrow"]["message"] == 'latent_cache = "shards" needs pyarrow, which is not installed here'
    assert "pip install pyarrow" in found["no-pyarrow"]["remedy"]


def checkout(folder, train_util, config_util=""):
    library = folder / "library"
    library.mkdir(parents=True, exist_ok=True)
    (library / "__init__.py").touch()
    (library / "strategy_base.py").touch()
    (library / "train_util.py").write_text(train_util, encoding="utf-8")
    (library / "config_util.py").write_text(config_util, encoding="utf-8")
    return folder


@pytest.mark.long
def test_a_checkout_that_cannot_be_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = checkout(tmp_path / "sd", "import no_such_package_anywhere")
    found, facts = findings("--sd-scripts", there, code=1)
    assert "No module named 'no_such_package_anywhere'" in found["cannot-import"]["message"]
    assert "requirements.txt" in found["cannot-import"]["remedy"]
    assert facts["sd-scripts"]["starts"].startswith("with accelerate launch -m kohya_bucket.launch")
    python = there / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    python.parent.mkdir(parents=True)
    python.touch()
    found, _ = findings("--sd-scripts", there, code=1)
    assert f"{python} -m kohya_bucket doctor" in found["cannot-import"]["remedy"]
    checkout(there, "raise RuntimeError('out of order')")
    found, _ = findings("--sd-scripts", there, code=1)
    assert "RuntimeError: out of order" in found["cannot-import"]["message"]
    checkout(there, "import os; os._exit(3)")
    found, _ = findings("--sd-scripts", there, code=1)
    assert "exit code 3" in found["cannot-import"]["message"]


def test_a_checkout_that_the_adapter_does_not_know(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    there = checkout(tmp_path / "sd", "class BaseDataset: ...\nclass DreamBoothDataset: ...\n")
    found, _ = findings("--sd-scripts", there, code=1)
    assert "a version that this adapter knows" in found["adapter-refuses"]["message"]


def test_a_checkout_is_found_where_one_is(tmp_path, monkeypatch):
    checkout(tmp_path / "sd-scripts", "x = 1")
    monkeypatch.chdir(tmp_path)
    assert "sd-scripts" in findings("--quick")[1]
    monkeypatch.chdir(tmp_path / "sd-scripts" / "library")
    assert "sd-scripts" not in findings("--quick")[1]
    for wrong, message in (("sd-scripts/library", "is not an sd-scripts checkout"), ("sd-script", "sd-scripts'?")):
        assert message in str(run("--sd-scripts", tmp_path / wrong).exception)


@pytest.mark.parametrize(("cloned", "remedy"), [(True, "submodule update --init"), (False, "clone --recursive")])
def test_a_gui_without_its_submodule_is_told_how_to_get_it(tmp_path, cloned, remedy):
    (tmp_path / "sd-scripts").mkdir()
    (tmp_path / ".gitmodules").touch()  # as in ai-toolkit, which has none any more
    assert "is not an sd-scripts checkout" in str(run("--sd-scripts", tmp_path).exception)
    (tmp_path / ".gitmodules").write_text('[submodule "sd-scripts"]\n\tpath = sd-scripts\n', encoding="utf-8")
    if cloned:
        (tmp_path / ".git").mkdir()
    assert remedy in str(run("--sd-scripts", tmp_path).exception)


@pytest.mark.posix("names of 255 bytes")
def test_names_that_are_too_long_to_be_cached(folder):
    (folder / "0.png").rename(folder / ("n" * 238 + ".png"))
    found = findings(write(folder))[0]["long-names"]
    assert found["names"] == [str(folder / ("n" * 238 + ".png"))]


def test_a_torch_without_cuda_beside_a_driver(tmp_path, monkeypatch):
    fake = tmp_path / "torch"
    fake.mkdir()
    (fake / "__init__.py").touch()
    monkeypatch.setattr(environment, "version_of", lambda _: "2.9.0")
    monkeypatch.setattr(environment.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    spec = namedtuple("Spec", "origin")(str(fake / "__init__.py"))
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: spec)
    for line, cuda, count in (
        ("cuda: Optional[str] = None\n", "", 1),
        ("cuda: Optional[str] = '12.8'\n", "12.8", 0),
        ("", None, 0),
    ):
        (fake / "version.py").write_text(f"__version__ = '2.9.0'\n{line}hip = None\n", encoding="utf-8")
        assert environment.cuda_of_torch() == cuda
        assert len(environment.packages_section().findings) == count


def test_a_torch_whose_3d_convolutions_are_slow(monkeypatch):
    for version, model, count in (
        ("2.9.0", "anima", 1), ("2.9.0+cu128", "qwen-image", 1), ("2.9.1", "anima", 0), ("2.10.0", "wan", 0),
        ("2.9.0", "sdxl", 0), ("2.9.0", "", 0),
    ):  # fmt: skip
        monkeypatch.setattr(environment, "version_of", lambda _, version=version: version)
        found = [one for one in environment.packages_section(model).findings if one.code == "slow-conv3d"]
        assert len(found) == count


def test_bytes_in_words():
    assert [human(n) for n in (0, 1500, 2_500_000, 3 * 10**9, 4 * 10**12)] == [
        "0.0 kB", "1.5 kB", "2.5 MB", "3.0 GB", "4.0 TB",
    ]  # fmt: skip


def test_it_begins_with_what_stops_the_training(folder, command_line) -> None:
    (folder / "0.txt").write_bytes(b"\xff\xfe\xfa")  # at which sd-scripts stops
    code, out, _ = command_line("doctor", write(folder), "--quick")
    assert code == 1
    severities = re.findall(r"^  (error|warning|note): ", out, re.MULTILINE)
    assert severities[0] == "error"
    assert out.index("  error: ") < out.index("this environment")
    assert out.index("\nconfig ") < out.index("  error: ") < out.index("  checked for")
