"""Copies of the real musubi-tuner (`MUSUBI_DIR`) in which a model has a name that no table here has."""

import json
import shutil
import subprocess
import sys

import pytest
from musubi_caching_cases import DOOR, captions, cases_in, items, play, refused
from musubi_support import SIZES, environment, trains_z_image

from kohya_bucket.trainers.musubi.families import defined_in

AS = {"qi21": ("Z_IMAGE", "zi"), "mf": ("HUNYUAN_VIDEO", "hv")}  # the second caches captions in two passes


def copied(source, folder, name):
    model, family = AS[name]
    if family == "zi" and not trains_z_image(source):
        pytest.skip("this version does not train Z-Image")
    shutil.copytree(source / "musubi_tuner", folder / "musubi_tuner")
    data = folder / "musubi_tuner" / "dataset"
    file = next(f for f in (data / "architectures.py", data / "image_video_dataset.py") if f.is_file())
    text = file.read_text(encoding="utf-8")
    assert f'ARCHITECTURE_{model} = "{family}"' in text
    file.write_text(text.replace(f'ARCHITECTURE_{model} = "{family}"', f'ARCHITECTURE_{model} = "{name}"'), "utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", AS)
def test_its_caches_are_checked(musubi_source, tmp_path, name):
    source = copied(musubi_source, tmp_path / "source", name)
    names = ("resolution", "edited", "cut_off", "same_stem")
    done = play(source, tmp_path, cases_in(source, tmp_path / "right", names, of=name), DOOR)
    *_, before, _, _, after = done["resolution"]
    refused(before, "3 of 3 items", "the bucket changed (128x128 -> 256x256)", "cache_latents.py")
    assert {tuple(row["size"]) for row in after["rows"]} == {(32, 32)}
    *_, before, again, text, after = done["edited"]
    refused(before, "1 of 3 items", "a1.png (latents: the image changed", "text: the caption changed")
    assert "3 items: 2 current, 1 made" in again["log"]
    assert "3 captions: 2 current, 1 made" in text["log"]
    assert items(after) == captions(after) == [0, 2, 101]
    *_, before, _, _, after = done["cut_off"]
    refused(before, "1 of 3 items", "a1.png (latents: ")
    assert items(after) == [0, 1, 2]
    *_, trained, _, _, _ = done["same_stem"]
    assert len(items(trained)) == len(captions(trained)) == 3


@pytest.mark.slow
def test_its_buckets_are_those_of_its_code(musubi_source):
    """Of every model that the checkout defines, by its own code."""
    known = defined_in(musubi_source / "musubi_tuner")
    program = (
        "import json; from musubi_tuner.dataset.image_video_dataset import BucketSelector as B; "
        f"print(json.dumps({{n: [B((960, 544), True, False, n).get_bucket_resolution(s) for s in {SIZES}] "
        f"for n in {list(known)}}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(musubi_source), capture_output=True, text=True, check=True
    )
    from kohya_bucket.buckets.trainers import MusubiTunerBuckets

    theirs = json.loads(done.stdout.splitlines()[-1])
    for name, family in known.items():
        assert MusubiTunerBuckets((960, 544), family.steps).place(SIZES).bucket_sizes.tolist() == theirs[name], name
