"""What is said about configs: every slip is named, with the place, the nearest key and the remedy, all at once."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from kohya_bucket.errors import ConfigError
from kohya_bucket.images.scan import Job
from kohya_bucket.trainers.sdscripts import dataset_images
from kohya_bucket.trainers.sdscripts.config import Config, Finding, Release, Severity, read_config, read_folders
from tests.faults import PASSING, Faults


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    images(tmp_path / "images", ["a.png", "b.png"], ".txt")
    return tmp_path


def images(folder: Path, names: list[str], captions: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (64, 64)).save(folder / name, format="PNG")
        if captions:
            (folder / name).with_suffix(captions).write_text("a caption\n", encoding="utf-8")
    return folder


def read(text: str, **options: object) -> Config:
    Path("config.toml").write_text(text, encoding="utf-8")
    return read_config("config.toml", **options)  # type: ignore[arg-type]


def found(config: Config, code: str) -> Finding:
    matching = [f for f in config.findings if f.code == code]
    assert matching, [f.code for f in config.findings]
    return matching[0]


GOOD = """
[[datasets]]
resolution = 512
enable_bucket = true
[[datasets.subsets]]
image_dir = 'images'
caption_extension = '.txt'
"""


def test_a_good_config_has_no_findings() -> None:
    config = read(GOOD)
    assert list(config.findings) == []
    assert config.datasets[0].images.keys == (os.path.join("images", "a.png"), os.path.join("images", "b.png"))


def test_what_is_no_table_is_named_with_its_line() -> None:
    text = found(read(f"general = 3\n{GOOD}"), "not-a-table").text
    assert "[general]: 3 is not a table: write [general] or [[datasets]]" in text


def test_all_slips_are_reported_in_one_run() -> None:
    config = read(
        "[general]\nenable_buckets = true\nimage_dir = 'x'\n"
        "[[datasets]]\nresolution = '512,768'\nbatchsize = 2\n"
        "[[datasets.subsets]]\nimage_dir = 'images'\nbatch_size = 4\nflip_aug = 'true'\nnum_repeat = 2\n"
        "[[datasets.subsets]]\nimage_dir = 'gone'\n"
    )
    texts = "\n".join(f.text for f in config.findings)
    assert "line 2, [general]: there is no key 'enable_buckets': did you mean 'enable_bucket'?" in texts
    assert "line 3, [general]: 'image_dir' does not belong in [general]: move it to [[datasets.subsets]]" in texts
    assert "line 5, dataset 1: resolution is '512,768'" in texts
    assert "write resolution = [512, 768]" in texts
    assert "'batch_size'?" in texts
    assert "line 9, dataset 1, subset 1: 'batch_size' does not belong in [[datasets.subsets]]" in texts
    assert "move it to [general] or [[datasets]]" in texts
    assert "write flip_aug = true" in texts
    assert "'num_repeats'?" in texts
    assert "image_dir 'gone' is not a folder" in texts


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("train_batch_size = 2", "'batch_size'?"),
        ("cache_latents = true", "stands on its command line (--cache_latents)"),
        ("train_inpainting = true", "(--train_inpainting)"),
        ("skip_image_resolutions = 512", "'skip_image_resolution'?"),
        ("skip_image_resolution = '512,768'", "write skip_image_resolution = [512, 768]"),
        ("skip_image_resolution = 512.5", "must be a whole number or two of them"),
        ("image_directory = 'x'", "did you mean 'image_dir'? It belongs in [[datasets.subsets]]"),
        ("validation_split = 1", "write validation_split = 1.0"),
        ("enable-bucket = true", "'enable_bucket'?"),
        ("enableBucket = true", "'enable_bucket'?"),
        ("network_multiplier = 1", "write network_multiplier = 1.0"),
        ("batch_size = '4'", "write batch_size = 4"),
        ("batch_size = 4.0", "write batch_size = 4"),
        ("batch_size = inf", "batch_size is inf"),
        ("batch_size = [nan, 1e300]", "batch_size is [nan, 1e+300]"),
        ("face_crop_aug_range = [2, 4]", "write face_crop_aug_range = [2.0, 4.0]"),
        ("kohya_bucket = { order = 'runs' }", "move it out, as [kohya_bucket]"),
        ("xyz = 1", "remove it; [[datasets]] knows batch_size, bucket_no_upscale"),
    ],
)
def test_remedies_for_dataset_keys(line: str, remedy: str) -> None:
    config = read(GOOD.replace("resolution = 512", f"resolution = 512\n{line}"))
    finding = config.findings.of(Severity.ERROR)[0]
    assert remedy in finding.text
    assert finding.where == "line 4, dataset 1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[dataset]]\n", "'datasets'?"),
        ("resolution = 512\n", "move it to [general] or [[datasets]]"),
        ("[training]\nx = 1\n", "the top level knows datasets, general, kohya_bucket"),
        ("learning_rate = 1e-4\n", "--learning_rate"),
        ("train_inpainting = true\n", "(--train_inpainting)"),
        ("kohya_bucket = 1\n", "[kohya_bucket] must be a table"),
    ],
)
def test_remedies_at_the_top_level(text: str, words: str) -> None:
    texts = [f.text for f in read(text + GOOD).findings]
    assert any(words in t for t in texts), texts


def test_single_brackets() -> None:
    config = read(GOOD.replace("[[datasets]]", "[datasets]"))
    assert "write [[datasets]] in double brackets" in found(config, "not-a-table").text
    assert len(config.datasets[0].images) == 2
    config = read(GOOD.replace("[[datasets.subsets]]", "[datasets.subsets]"))
    assert "write [[datasets.subsets]] in double brackets" in found(config, "not-a-table").text
    assert len(config.datasets[0].images) == 2


def test_keys_of_another_kind_of_dataset() -> None:
    Path("meta.json").write_text(json.dumps({"a.png": {"caption": "x"}}), encoding="utf-8")
    config = read(
        "[[datasets]]\nresolution = 512\nenable_bucket = true\n[[datasets.subsets]]\n"
        "image_dir = 'images'\nmetadata_file = 'meta.json'\ncaption_extension = '.txt'\n"
    )
    assert (
        "is for controlnet and dreambooth datasets; this is a fine-tuning dataset"
        in found(config, "misplaced-key").text
    )
    config = read(GOOD + "metadata_fil = 'meta.json'\n")
    assert "'metadata_file'?" in found(config, "unknown-key").text


def test_keys_newer_than_the_release() -> None:
    text = GOOD.replace("resolution = 512", "resolution = 512\nskip_image_resolution = 8")
    assert not len(read(text).findings)
    finding = found(read(text, release=Release.from_version("0.10.1")), "misplaced-key")
    assert "new in sd-scripts 0.10.2, and 0.10.1" in finding.text


# -- files that cannot be parsed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('image_dir = "C:\\data\\cats"', r"put Windows paths in single quotes: 'C:\data\cats'"),
        ('image_dir = "C:\\Users\\me"', "single quotes"),
        ("image_dir = images", "Text is written in quotes"),
        ("flip_aug = True", "Booleans are written true and false"),
        ("resolution = 512, 768", "in brackets: [512, 768]"),
        ("resolution = [512, 768", "line 7: a list is opened with [ and never closed"),
        ("face_crop_aug_range = [2, 4.0]", "[2.0, 4.0], not [2, 4.0]"),
    ],
)
def test_what_toml_does_not_take(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(GOOD.rstrip("\n").rsplit("\n", 1)[0] + f"\n{line}\n")
    assert words in str(caught.value)
    assert "config.toml, line " in str(caught.value)


def test_a_path_whose_backslashes_became_control_characters() -> None:
    config = read(GOOD.replace("'images'", '"C:\\new\\train"'))
    text = found(config, "missing-folder").text
    assert r"'C:\new\train'" in text
    assert "single quotes" in text


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xef\xbb\xbf" + GOOD.encode(), "byte order mark"),
        ("# caf\xe9\n".encode("latin-1") + GOOD.encode(), "line 1: not UTF-8"),
        (GOOD.encode("utf-16"), "not UTF-8"),
        (b"", r"no [[datasets]]"),
    ],
)
def test_bytes_that_are_no_config(raw: bytes, words: str) -> None:
    Path("config.toml").write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        read_config("config.toml")
    assert words in str(caught.value)


def test_missing_folder_and_other_suffixes() -> None:
    for name, words in (("gone.toml", "does not exist"), (".", "is a folder"), ("images/a.txt", ".toml or .json")):
        with pytest.raises(ConfigError) as caught:
            read_config(name)
        assert words in str(caught.value)
    Path("mine").mkdir()
    Path("mine/sdxl-lora.toml").write_text(GOOD, encoding="utf-8")
    for name in ("mine/sdxl_lora.toml", "mine/sdxl-lora.tml", "sdxl-lora.toml"):
        with pytest.raises(ConfigError, match=r"sdxl-lora\.toml'\?$"):
            read_config(name)
    Path("bad.json").write_text("{'a': 1}", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_config("bad.json")


def test_windows_line_ends_and_json_read_alike() -> None:
    plain = read(GOOD)
    Path("crlf.toml").write_bytes(GOOD.replace("\n", "\r\n").encode())
    assert read_config("crlf.toml").datasets[0].config == plain.datasets[0].config
    tables = {"datasets": [{"resolution": 512, "enable_bucket": True, "subsets": [
        {"image_dir": "images", "caption_extension": ".txt"}]}]}  # fmt: skip
    Path("config.json").write_text(json.dumps(tables), encoding="utf-8")
    assert read_config("config.json").datasets[0].images.keys == plain.datasets[0].images.keys


# -- folders and captions ----------------------------------------------------------------------------


def test_a_relative_folder_beside_the_config(workplace: Path) -> None:
    images(workplace / "sub" / "set", ["x.png"], ".txt")
    (workplace / "sub" / "c.toml").write_text(GOOD.replace("'images'", "'set'"), encoding="utf-8")
    finding = found(read_config("sub/c.toml"), "missing-folder")
    assert "It exists beside the config file" in finding.text
    assert str(workplace) in finding.text


def test_a_mistyped_folder_and_an_empty_one(workplace: Path) -> None:
    assert "'images'?" in found(read(GOOD.replace("'images'", "'imagse'")), "missing-folder").text
    images(workplace / "outer" / "inner", ["x.png"])
    finding = found(read(GOOD.replace("'images'", "'outer'")), "empty-folder")
    assert "subfolders are not searched" in finding.text
    assert "inner" in finding.text


def test_images_in_subfolders_are_named_unless_the_config_has_the_folder(workplace: Path) -> None:
    for name in ("one", "two"):
        images(workplace / "images" / name, [f"{name}.png"])
    subset = "[[datasets.subsets]]\nimage_dir = 'images/one'\n"
    assert found(read(GOOD), "subfolders").names == tuple(
        os.path.join("images", name, f"{name}.png") for name in ("one", "two")
    )
    finding = found(read(GOOD + subset), "subfolders")
    assert (finding.severity, finding.names) == (Severity.NOTE, (os.path.join("images", "two", "two.png"),))


def test_captions_under_another_extension() -> None:
    config = read(GOOD.replace("caption_extension = '.txt'\n", ""))
    finding = found(config, "caption-extension")
    assert (
        "caption_extension is '.caption' (the default), but 2 of 2 images have their caption in '.txt'" in finding.text
    )
    assert finding.severity is Severity.WARNING
    config = read(GOOD.replace("'.txt'", "'.caption'") + "class_tokens = 'cat'\n")
    assert "the class tokens 'cat' would be trained" in found(config, "caption-extension").text


@pytest.mark.parametrize(
    ("others", "remedy"), [(1, "rename them to '.txt'"), (3, "set caption_extension = '.caption'")]
)
def test_the_extension_of_most_captions_stays(workplace: Path, others: int, remedy: str) -> None:
    images(workplace / "images", [f"other{i}.png" for i in range(others)], ".caption")
    images(workplace / "images", ["without.png"])
    config = read(GOOD)
    finding = found(config, "caption-extension")
    assert (finding.remedy, len(finding.names)) == (remedy, others)
    assert found(config, "missing-captions").names == (os.path.join("images", "without.png"),)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["alone", "threads", "processes"])
def test_every_engine_reads_the_same_captions(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    names = [f"{i:03}.png" for i in range(200)]
    for folder in ("images", "more"):
        images(Path(folder), names)
        for i, name in enumerate(names):
            if i % 10:
                text = f"{folder} {i}\nsecond\n" if i % 7 else ""
                Path(folder, name).with_suffix(".txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(dataset_images, "Job", partial(Job, engine=engine, workers=3))
    config = read(GOOD + "[[datasets.subsets]]\nimage_dir = 'more'\ncaption_extension = '.txt'\nclass_tokens = 'cat'\n")
    assert [len(f.names) for f in config.findings if f.code == "broken-caption"] == [26, 26]
    for key, caption in zip(config.datasets[0].images.keys, config.datasets[0].images.captions, strict=True):
        folder, i = os.path.dirname(key), Path(key).stem
        if i.isdigit() and int(i) % 10 and int(i) % 7:
            assert caption == f"{folder} {int(i)}"
        elif folder == "more":
            assert caption == "cat"


def test_empty_foreign_and_missing_captions() -> None:
    Path("images/a.txt").write_bytes(b"")
    Path("images/b.txt").write_bytes("caf\xe9".encode("latin-1"))
    config = read(GOOD)
    foreign, empty = (one for one in config.findings if one.code == "broken-caption")
    assert (foreign.names, empty.names) == ((os.path.join("images", "b.txt"),), (os.path.join("images", "a.txt"),))
    assert "not in UTF-8" in foreign.message
    assert foreign.remedy == "`kohya-bucket fix images` writes them as UTF-8"
    assert "it is empty" in empty.message
    Path("images/a.txt").write_text("first\nsecond\n", encoding="utf-8")
    Path("images/b.txt").unlink()
    config = read(GOOD)
    assert config.datasets[0].images.captions == ("first", None)
    assert found(config, "missing-captions").severity is Severity.WARNING
    assert "1 of 2 images has no '.txt' file, so an empty caption would be" in found(config, "missing-captions").message
    config = read(GOOD + "class_tokens = 'cat'\n")
    assert found(config, "missing-captions").severity is Severity.NOTE
    Path("images/a.txt").unlink()
    assert found(read(GOOD), "missing-captions").severity is Severity.WARNING
    assert not len(read(GOOD + "class_tokens = 'cat'\n").findings)
    assert not len(read(GOOD.replace("'.txt'", "'.txt'\nenable_wildcard = true"), check_captions=False).findings)


def test_images_that_differ_by_extension_only(workplace: Path) -> None:
    images(workplace / "images", ["a.jpg"])
    assert len(found(read(GOOD), "same-stem").names) == 2


def test_files_that_look_like_images(workplace: Path) -> None:
    images(workplace / "images", ["c.gif", "d.Png"])
    finding = found(read(GOOD), "ignored-files")
    names = ("c.gif", "d.Png") if os.name != "nt" else ("c.gif",)
    assert finding.names == tuple(os.path.join("images", name) for name in names)
    assert (finding.count, finding.remedy) == (len(names), "`kohya-bucket fix images` converts or renames them")


def test_subsets_that_are_passed_over() -> None:
    config = read(
        GOOD
        + "[[datasets.subsets]]\nimage_dir = 'images'\n[[datasets.subsets]]\nimage_dir = 'images'\nnum_repeats = 0\n"
    )
    assert {"duplicate-subset", "no-repeats"} <= {f.code for f in config.findings}
    assert len(config.datasets[0].images) == 2


def test_values_that_cannot_work() -> None:
    text = GOOD.replace("resolution = 512", "resolution = 200\nbatch_size = 0\nvalidation_split = 20.0")
    config = read(text)
    assert {"bucket-settings", "batch-size", "validation-split"} <= {f.code for f in config.findings}
    assert "must be from 0 to 1" in found(config, "validation-split").text


def test_split_without_seed_is_said_not_to_be_reproducible() -> None:
    config = read(GOOD.replace("resolution = 512", "resolution = 512\nvalidation_split = 0.5"))
    assert found(config, "validation-seed").severity is Severity.WARNING
    dataset = config.datasets[0]
    assert dataset.validation is not None
    assert (len(dataset.images), len(dataset.validation)) == (1, 1)


def test_no_cache_is_written() -> None:
    before = sorted(p.name for p in Path("images").iterdir())
    read(GOOD + "cache_info = true\n")
    assert sorted(p.name for p in Path("images").iterdir()) == before


# -- the command line --------------------------------------------------------------------------------


def test_folders_with_repeats(workplace: Path) -> None:
    images(workplace / "train" / "3_cat toy", ["x.png"], ".txt")
    images(workplace / "train" / "no", ["y.png"])
    images(workplace / "train", ["loose.png"])
    images(workplace / "reg" / "1_toy", ["r0.png", "r1.png"])
    config = read_folders("train", "reg", {"resolution": 512, "enable_bucket": True, "caption_extension": ".txt"})
    subset = config.datasets[0].config.subsets[0]
    assert (subset.num_repeats, subset.class_tokens) == (3, "cat toy")
    assert config.datasets[0].images.repeats.tolist() == [3, 2, 1]
    assert {"no-repeat-folders", "loose-images"} == {f.code for f in config.findings}


def test_the_folder_itself_instead_of_the_one_above(workplace: Path) -> None:
    images(workplace / "train" / "3_cat", ["x.png"], ".txt")
    text = found(read_folders(str(workplace / "train" / "3_cat"), None, {"resolution": 512}), "no-repeat-folders").text
    assert f"give the folder above it, {str(workplace / 'train')!r}" in text
    with pytest.raises(ConfigError, match="is not a folder"):
        read_folders("gone")


def test_command_line_values_that_the_config_overrules() -> None:
    config = read(GOOD, command_line={"resolution": (1024, 1024), "batch_size": 3})
    assert config.datasets[0].config.batch_size == 3
    assert config.datasets[0].config.resolution == (512, 512)
    assert "--resolution 1024,1024 is ignored, because the config has resolution" in found(config, "overruled").text
    text = GOOD.replace("resolution = 512", "resolution = 512\nkeep_tokens = 2")
    read_alike = read(
        text, command_line={"resolution": (512, 512), "keep_tokens": 3}
    )  # which decides about captions alone
    assert read_alike.datasets[0].config.subsets[0].keep_tokens == 2
    assert "overruled" not in [f.code for f in read_alike.findings]


@pytest.mark.parametrize("share", ["inf", "nan", "-1.0", "1e400"])
def test_a_share_that_is_none_is_named(share):
    config = read(GOOD.replace("resolution = 512", f"resolution = 512\nvalidation_split = {share}"))
    assert "but must be from 0 to 1" in found(config, "validation-split").text


def test_a_share_in_percent_trains_nothing() -> None:
    config = read(GOOD.replace("resolution = 512", "resolution = 512\nvalidation_split = 20.0"))
    assert len(config.datasets[0].images) == 0  # the slice that sd-scripts takes is then empty


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"a.png": {"image_size": [99999999999, 5]}}', "must be [width, height]"),
        (b'{"a.png": {"image_size": [true, true]}}', "must be [width, height]"),
        (b'{"a.png": {"tags": ["x", "y"]}}', "tags of 'a.png' is ['x', 'y'], but must be a text"),
        (b'{"a.png": {"caption": "x \\ud83d"}}', "must be a text of whole characters"),
        (b'{"a.png": {"caption": 5}}', "caption of 'a.png' is 5"),
        (b'\xef\xbb\xbf{"a.png": {}}', "save it as 'UTF-8', not 'UTF-8 with BOM'"),
        (b'{"a.png": {"caption": "gr\xfcn"}}', "is not UTF-8"),
        (b"[" * 100_000, "broken-metadata"),
    ],
)
def test_metadata_that_cannot_be_used(content: bytes, why: str) -> None:
    Path("meta.json").write_bytes(content)
    config = read(GOOD.replace("caption_extension = '.txt'", "metadata_file = 'meta.json'"))
    finding = found(config, "broken-metadata")
    assert why in finding.code + finding.text


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["meta.json", os.path.join("images", "metadata_cache.json")])
def test_a_file_that_cannot_be_read_now_is_not_to_be_deleted(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    Path(name).write_text("{}", encoding="utf-8")
    text = GOOD.replace("caption_extension = '.txt'", "metadata_file = 'meta.json'") if name == "meta.json" else GOOD
    faults = Faults(Path(name))
    faults.install(monkeypatch)
    with faults.at(range(2, 100), code):  # it is there
        findings = read(text + "cache_info = true\n" * (text is GOOD)).findings
    assert "leave it as it is, and run again" in next(f for f in findings if f.code.startswith("broken-")).remedy


@pytest.mark.parametrize("side", ["99999999999", "1e400"])
def test_a_noted_size_out_of_range_breaks_the_cache(side: str) -> None:
    name = json.dumps(os.path.join("images", "a.png"))
    text = f'{{{name}: {{"caption": "x", "resolution": [{side}, 5]}}}}'
    Path("images", "metadata_cache.json").write_text(text, encoding="utf-8")
    finding = found(read(GOOD + "cache_info = true\n"), "broken-cache")
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "n" * 300], ids=ascii)
def test_a_folder_of_a_name_that_none_can_have_is_a_finding(name: str) -> None:
    subset = {"image_dir": name, "caption_extension": ".txt"}
    data = {"datasets": [{"resolution": 64, "subsets": [subset]}]}
    Path("config.json").write_text(json.dumps(data), encoding="utf-8")
    assert found(read_config("config.json"), "missing-folder").severity is Severity.ERROR
