"""musubi-tuner's real caching programs and datasets: what they do of themselves, and with the door open."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from musubi_caching_cases import DOOR, Case, captions, cases_in, items, knows_minimax_h3, play, refused
from musubi_support import environment, family

from kohya_bucket.trainers.musubi.architectures import ARCHITECTURES
from kohya_bucket.trainers.musubi.checkout import clips_always_in_buckets, repaired_encoder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sides(musubi_source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("caching")
    return {
        "left": play(musubi_source, folder / "left", cases_in(musubi_source, folder / "left"), ()),
        "right": play(musubi_source, folder / "right", cases_in(musubi_source, folder / "right"), DOOR),
        "folder": folder,
    }


def sizes(result):
    """(height, width) of the latents that were trained."""
    return {tuple(row["size"]) for row in result["rows"]}


@pytest.fixture(scope="module")
def left(sides):
    return sides["left"]


@pytest.fixture(scope="module")
def right(sides):
    return sides["right"]


def test_a_resolution_that_changed(left, right):
    """Their names hold no resolution, and what is skipped is what exists."""
    *_, before, _, _, after = left["resolution"]
    assert {tuple(row["size"]) for result in (before, after) for row in result["rows"]} == {(16, 16)}
    *_, before, again, text, after = right["resolution"]
    line = refused(before, "3 of 3 items", "the bucket changed (128x128 -> 256x256)", "_cache_latents.py")
    assert "text_encoder" not in line
    assert "3 items: 0 current, 3 made" in again["log"]
    assert "3 captions: 3 current, 0 made" in text["log"]
    assert {tuple(row["size"]) for row in after["rows"]} == {(32, 32)}


def test_an_image_and_a_caption_that_changed(left, right):
    *_, before, _, _, after = left["edited"]
    assert items(before) == captions(before) == items(after) == captions(after) == [0, 1, 2]
    *_, before, again, text, after = right["edited"]
    refused(before, "1 of 3 items", "a1.png (latents: the image changed", "text: the caption changed")
    assert "3 items: 2 current, 1 made" in again["log"]
    assert "3 captions: 2 current, 1 made" in text["log"]
    assert items(after) == captions(after) == [0, 2, 101]


def test_a_file_that_is_cut_off(left, right):
    *_, before, _, _, after = left["cut_off"]
    assert "SafetensorError" in before["error"]
    assert "SafetensorError" in after["error"]
    *_, before, again, _, after = right["cut_off"]
    refused(before, "a1.png (latents: it is broken (4000 bytes of ")
    assert "3 items: 2 current, 1 made" in again["log"]
    assert items(after) == [0, 1, 2]


def test_an_image_that_was_deleted(left, right):
    _, _, trained, files, _, _, cleaned = left["deleted"]
    assert items(trained) == [0, 1, 2]
    _, _, trained, kept, _, _, after = right["deleted"]
    assert items(trained) == [0, 2]
    assert "because the config does not ask for it: 2 files (a1_" in trained["log"]
    assert kept["files"].keys() == files["files"].keys()
    assert after["files"].keys() == cleaned["files"].keys()
    assert not any(name.startswith("a1") for name in after["files"])


def test_an_image_of_another_size(left, right):
    assert items(left["replaced"][-1]) == [0, 1, 1]
    trained = right["replaced"][-1]
    assert items(trained) == [0, 1]
    assert "because the config does not ask for it: 1 file (a1_0128x0128_" in trained["log"]


def test_images_that_share_a_stem_or_a_name(left, right):
    assert len(items(left["same_stem"][2])) == 2
    assert len(items(left["same_name"][-1])) == 1
    *_, trained, latents, text, files = right["same_stem"]
    assert sorted(items(trained)) == [1, 3, 200]
    assert captions(trained) == [1, 1, 3]
    assert "3 items: 3 current" in latents["log"]
    assert "3 captions: 3 current" in text["log"]
    assert len(files["files"]) == 6
    trained = right["same_name"][-1]
    assert items(trained) == [10, 20, 20]
    assert captions(trained) == [10, 20, 30]


def test_an_image_shorter_than_a_step(left, right):
    *_, files, trained = left["too_small"]
    assert "thin_0300x0012_qi.safetensors" in files["files"]
    assert "size 0" in trained["error"]
    cached, _, files, trained = right["too_small"]
    assert "1 item left out: thin.png: 300x12 is too small" in cached["log"]
    assert "thin_0300x0012_qi.safetensors" not in files["files"]
    assert items(trained) == [1]
    assert "1 item left out: thin.png" in trained["log"]


def test_an_image_that_cannot_be_read(left, right):
    cached, _, trained = left["unreadable"]
    assert "truncated" in cached["error"]
    assert "rows" not in trained
    cached, _, trained = right["unreadable"]
    assert "1 item left out: a1.png: cannot be read as an image" in cached["log"]
    assert items(trained) == [0, 2, 3, 4]
    assert "1 item left out: a1.png" in trained["log"]


def test_latents_that_are_not_finite(right):
    cached, _, again, trained = right["not_finite"]
    assert "1 item left out: a1.png: its latents_1x16x16_float32 is not finite (NaN or infinity)" in cached["log"]
    assert "3 items: 2 current, 1 made" in again["log"]
    assert items(trained) == [0, 2, 101]


def test_the_option_for_broken_files(left, right):
    if "exit" in left["skip_broken"][-2]:
        pytest.skip("this version has no --skip_broken")
    before, _, after = left["skip_broken"][-3:]
    assert before["files"].keys() - after["files"].keys() == {"a1_0128x0128_zi.safetensors"}
    assert all(before["files"][name] < after["files"][name] for name in after["files"] if "_te" not in name)
    before, cached, after = right["skip_broken"][-3:]
    assert "3 items: 2 current, 0 made" in cached["log"]
    assert "1 item left out: a1.png: cannot be read as an image" in cached["log"]
    assert after["files"] == before["files"]


def test_images_none_of_which_can_be_read(left, right):
    """A drive that is not there shall not cost the caches."""
    ended, files = right["all_broken"][2:]
    assert ended["exit"] == 2
    assert "none of 2 items can be cached" in ended["log"]
    assert files["files"].keys() == left["all_broken"][-1]["files"].keys()


def test_captions_in_another_encoding(left, right):
    assert ["UnicodeDecodeError" in result["error"] for result in left["other_encodings"][:3]] == [True] * 3
    *both, of_list, cached = right["other_encodings"]
    for result in both:
        refused(result, "1 caption file not in UTF-8", "a1.txt", "`kohya-bucket fix ")
    refused(of_list, "list.jsonl")
    assert "FileNotFoundError" in cached["error"]


def test_an_item_without_a_cached_caption(left, right):
    assert items(left["no_text"][-1]) == [0, 2]
    line = refused(right["no_text"][-1], "a1.png (text: not encoded yet)", "_cache_text_encoder_outputs.py")
    assert "_cache_latents" not in line


def test_what_is_current_is_kept(left, right):
    def made_again(results):
        first, second, third = (result["files"] for result in results if "files" in result)
        return [
            {name.split("_")[-1] for name in a if a[name] != b[name]} for a, b in ((first, second), (second, third))
        ]

    everything, nothing = made_again(left["kept"])
    assert (len(everything), nothing) == (2, set())
    kept, other_vae = made_again(right["kept"])
    assert kept == set()
    assert len(other_vae) == 1
    assert "te.safetensors" not in other_vae
    assert "the VAE's weights changed" in right["kept"][-2]["log"]


def test_a_folder_without_items(left, right):
    assert items(left["no_item"][-1]) == [7]
    refused(right["no_item"][-1], "has no items with captions")


def test_other_target_frames(left, right):
    _, _, first, before, _, _, after = left["other_frames"]
    assert len(items(before)) == 4
    assert len(items(after)) == 6
    _, _, same, before, _, _, after = right["other_frames"]
    assert items(same) == items(first) == [10, 10, 20, 20]
    refused(before, "target_frames changed ([1, 5] -> [9])")
    assert items(after) == [10, 20]
    assert "because the config does not ask for it: 4 files" in after["log"]


def test_clips_without_enable_bucket(musubi_source, left, right):
    *_, before, latents, _, after = right["without_buckets"]
    assert items(after) == [10, 20, 30, 40]
    assert {len(row["items"]) for row in after["rows"]} == {2}
    if clips_always_in_buckets(musubi_source / "musubi_tuner"):
        alone = left["without_buckets"][
            -1
        ]  # ends, unless clips of one size happen to meet: it goes by the folder's order
        mixed = "stack expects each tensor to be equal size" in alone.get("error", "")
        assert mixed or sizes(alone) == {(16, 16), (14, 18)}
        assert items(before) == [10, 20, 30, 40]
        assert sizes(after) == {(16, 16), (14, 18)}
        return
    refused(before, "2 of 4 items", "the bucket changed (144x112 -> 128x128)")
    assert "4 items: 2 current, 2 made" in latents["log"]
    assert sizes(after) == sizes(left["without_buckets"][-1]) == {(16, 16)}


def test_clips_that_are_not_enlarged(musubi_source, left, right):
    *_, before, latents, _, after = right["not_enlarged"]
    assert items(after) == [10, 20, 30]
    if clips_always_in_buckets(musubi_source / "musubi_tuner"):
        assert items(before) == [10, 20, 30]
        assert sizes(before) == sizes(after) == sizes(left["not_enlarged"][-1])
        assert min(min(size) for size in sizes(after)) > 16
        return
    refused(before, "4 of 4 items", "bucket_no_upscale changed (False -> True)")
    assert "v9: it is too small: with bucket_no_upscale it gets no bucket" in latents["log"]
    assert "ZeroDivisionError" in left["not_enlarged"][-3]["error"] or "too small" in left["not_enlarged"][-3]["error"]
    assert sizes(after) == {(16, 16), (14, 20)}


def test_a_video_that_is_too_short(left, right):
    trained = right["short_video"][-1]
    assert items(trained) == items(left["short_video"][-1]) == [10, 20]
    assert "v1b: 3 frames, and none of target_frames is that short" in trained["log"]


def test_a_clip_in_several_files(left, right):
    """FramePack: a section is missing, then the window changes."""
    _, _, files, whole, *_, missing, _, _, after, other = right["sections"]
    assert files["files"].keys() == left["sections"][2]["files"].keys()
    assert items(whole) == items(after) == [10, 10, 20, 20]
    refused(missing, "v1 (latents: not encoded yet)")
    refused(other, "fp_latent_window_size changed (1 -> 2)")


def test_two_text_encoders_in_one_file(left, right):
    _, _, first, text, after = right["two_passes"]
    assert captions(first) == captions(left["two_passes"][-1]) == [0, 1, 2]
    assert "3 captions: 2 current, 1 made" in text["log"]
    assert captions(after) == [0, 2, 101]


def test_control_images(left, right):
    """Latents and, with this model family, text outputs depend on them."""
    *_, before, latents, text, after = right["controls"]
    assert items(left["controls"][-1]) == items(after) == [0, 1]
    refused(before, "a1.png (latents: the image changed", "text: the image changed")
    assert "2 items: 1 current, 1 made" in latents["log"]
    assert "2 captions: 1 current, 1 made" in text["log"]
    trained = right["repeated"][-1]
    assert items(trained) == captions(trained) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_lines_that_differ_in_their_controls_alone(left, right):
    """Alone, each takes the place of the one before."""
    assert len(items(left["other_controls"][-3])) < 3
    *_, trained, latents, text = right["other_controls"]
    assert items(trained) == [0] * 3
    assert captions(trained) == [7] * 3
    assert sorted(len(row["items"]) for row in trained["rows"]) == [1, 2]
    assert "3 items: 3 current" in latents["log"]
    assert "3 captions: 3 current" in text["log"]


def test_minimax_h3(musubi_source, left, right):
    if not knows_minimax_h3(musubi_source):
        pytest.skip("this version does not train MiniMax-H3")
    first, files, latents, text, again, changed, _, _, after, shorter, _, _, fewer, last = right["minimax_h3"][2:]
    theirs = left["minimax_h3"]
    assert items(first) == items(theirs[2]) == items(after)
    assert captions(first) == captions(after) == captions(theirs[2]) == [0, 0, 1, 1, 2]
    assert sizes(first) == sizes(theirs[2]) == {(4, 6)}
    assert files["files"] == again["files"]
    assert files["files"].keys() == theirs[3]["files"].keys()
    assert "3 items: 3 current, 0 made" in latents["log"]
    assert "3 captions: 3 current, 0 made" in text["log"]
    refused(changed, "v0.mp4 (latents: the image changed (1 -> 2 files)", "v1.mp4 (latents: further keys changed ( -> ")
    refused(changed, "v2.mp4 (latents: the image changed (its content hash differs)")
    refused(shorter, "latents: target_frames changed ([5, 22] -> [5]), text: target_frames changed ([5, 22] -> [5])")
    assert fewer["files"].keys() == theirs[14]["files"].keys()
    assert captions(last) == [0, 1, 2]
    _, _, trained, moved = right["minimax_h3_images"]
    assert items(trained) == captions(trained) == items(left["minimax_h3_images"][2]) == [0, 1, 2]
    refused(moved, "fp_1f_target_index changed (5 -> 9)")


@pytest.fixture(scope="module")
def encoded_before(musubi_source, tmp_path_factory):
    """What a checkout cached before FLUX.1 Kontext's text encoder was repaired, with and without the door."""
    if repaired_encoder(musubi_source / "musubi_tuner", "fk") is None:
        pytest.skip("this version has not repaired the text encoder")
    folder = tmp_path_factory.mktemp("before")
    before = shutil.copytree(musubi_source, folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    loads = before / "musubi_tuner" / "flux" / "flux_utils.py"
    loads.write_text(loads.read_text(encoding="utf-8").replace("t5xxl.eval()", "pass"), encoding="utf-8")
    cases = {}
    for name, door in (("ours", DOOR), ("theirs", ())):
        case = cases[name] = Case(folder / name, "fk")
        for i in range(2):
            case.image(f"a{i}.png", i)
        case.dataset()
        case.text()
        (done,) = play(before, folder / f"run-{name}", {name: case}, door)[name]
        assert "error" not in done
        assert "exit" not in done
        case.steps.clear()
    return folder, cases


def test_outputs_of_an_encoder_that_was_repaired_since(musubi_source, encoded_before):
    """Ours say it. Of others, those that are older than the code with the repair are made again."""
    folder, cases = encoded_before
    loads = repaired_encoder(musubi_source / "musubi_tuner", "fk").file
    for name in ("a0", "a1"):
        file = Path(cases["theirs"].cache) / f"{name}_fk_te.safetensors"
        seconds = 60 if name == "a0" else -60
        os.utime(file, (loads.stat().st_mtime - seconds,) * 2)
    for case in cases.values():
        case.text()
        case.text()
    results = play(musubi_source, folder / "after", cases, DOOR)
    said = "(musubi-tuner's text encoder changed (T5's dropout was active -> repaired since))"
    for name, made in (("ours", 2), ("theirs", 1)):
        first, second = results[name]
        assert f"2 captions: {2 - made} current, {made} made" in first["log"]
        assert f"made again: a0.png {said}" in first["log"]
        assert "2 captions: 2 current, 0 made" in second["log"]


def test_families_whose_encoder_was_repaired(musubi_source):
    """Both in one version."""
    package = musubi_source / "musubi_tuner"
    found = [repaired_encoder(package, family) for family in ARCHITECTURES]
    assert sum(one is not None for one in found) in (0, 2)
    assert all(one is None or one.file.is_file() for one in found)


def test_without_opencv(musubi_source, tmp_path):
    """Where it is optional (since 0.3.6), musubi-tuner puts a module of its own in its place."""
    if not (musubi_source / "musubi_tuner" / "utils" / "cv2_compat.py").is_file():
        pytest.skip("this version needs OpenCV")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "cv2.py").write_text("raise ImportError('not here')\n", encoding="utf-8")
    case = Case(tmp_path / "data", family(musubi_source))
    for i in range(3):
        case.image(f"a{i}.png", i, (200, 150))
    case.dataset()
    case.both()
    case.train()
    path = os.pathsep.join([str(tmp_path / "none"), environment(musubi_source)["PYTHONPATH"]])
    results = play(musubi_source, tmp_path, {"steps": case}, DOOR, PYTHONPATH=path)["steps"]
    assert items(results[-1]) == captions(results[-1]) == [0, 1, 2]


def test_pixels_per_latent(musubi_source):
    """Of the autoencoders whose latents are made smaller than an eighth."""
    program = (
        "import importlib, torch\n"
        "for family, module in (('f2d', 'flux_2.flux2_models'), ('i4', 'ideogram4.ideogram4_autoencoder')):\n"
        "    try: module = importlib.import_module(f'musubi_tuner.{module}')\n"
        "    except ModuleNotFoundError: continue\n"
        "    with torch.device('meta'): model = module.AutoEncoder(module.AutoEncoderParams())\n"
        "    print(family, 256 // model.encode(torch.zeros(1, 3, 256, 256, device='meta')).shape[-1])\n"
    )
    told = environment(musubi_source)
    done = subprocess.run([sys.executable, "-c", program], env=told, capture_output=True, text=True, check=True)
    found = [line.split() for line in done.stdout.splitlines() if line.count(" ") == 1]
    assert found or not (musubi_source / "musubi_tuner" / "flux_2").is_dir()
    assert all(ARCHITECTURES[family].stride == int(stride) for family, stride in found if family in ARCHITECTURES)


@pytest.fixture(scope="module")
def mixed(musubi_source, sides):
    """What each side makes of the other's files."""
    folder = sides["folder"]
    resolutions = []
    for side in ("left", "right"):
        case = Case(folder / side / "kept", family(musubi_source))
        case.steps.clear()
        case.train()
        resolutions.append(case)
    ours, theirs = resolutions[1], resolutions[0]
    theirs.dataset((256, 256))
    theirs.train()
    theirs.dataset()
    theirs.both()
    theirs.image("a1.png", 101)
    theirs.train()
    theirs.text()
    theirs.latents()
    theirs.train()
    first = play(musubi_source, folder / "again", {"ours": ours}, ())
    return first | play(musubi_source, folder / "again", {"theirs": theirs}, DOOR)


def test_each_reads_what_the_other_made(mixed):
    assert items(mixed["ours"][0]) == captions(mixed["ours"][0]) == [0, 1, 2]
    believed, other, latents, text, edited, _, _, after = mixed["theirs"]
    assert items(believed) == captions(believed) == [0, 1, 2]
    refused(other, "the bucket changed (128x128 -> 256x256)")
    assert "3 items: 3 current" in latents["log"]
    assert "3 captions: 3 current" in text["log"]
    refused(edited, "a1.png (latents: the image or its name is newer than its cache", "text: the caption changed")
    assert items(after) == captions(after) == [0, 2, 101]
