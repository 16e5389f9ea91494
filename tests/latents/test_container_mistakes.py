"""Sources of `precompute` that cannot be read, or not together: one line each, which says what to do."""

import gzip
import json
from pathlib import Path

import pytest

from kohya_bucket.cli import sources
from kohya_bucket.latents import LatentStore
from kohya_bucket.latents.vae import diffusers_vae
from tests.command_line import encoded_counts
from tests.latents.containers import cells, make_table, make_tar, make_tars, with_captions
from tests.latents.stub_encoders import MeanEncoder, make_images

RULE = ("--vae", "mean", "--resolution", "64", "--min-bucket-reso", "32", "--max-bucket-reso", "128",
        "--bucket-reso-steps", "16", "-o", "out")  # fmt: skip
SIZES = [(100, 60), (60, 100), (64, 64), (90, 80)]


def write(path: Path, content: bytes | str | dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def run(monkeypatch, command_line, tmp_path):
    monkeypatch.setattr(diffusers_vae, "load_encoder", lambda *_, **__: MeanEncoder())
    monkeypatch.chdir(tmp_path)

    def precompute(*arguments):
        return command_line("precompute", *arguments, *RULE)

    return precompute


@pytest.fixture
def here(tmp_path):
    """What the cases below name."""
    images = with_captions(make_images(tmp_path / "images", SIZES))
    (tar,) = make_tars(tmp_path / "tars", images, 9)
    table = make_table(tmp_path / "t.parquet", cells(images))
    write(tmp_path / "x.tar.gz", gzip.compress(tar.read_bytes()))
    write(tmp_path / "packed.tar", gzip.compress(tar.read_bytes()))
    write(tmp_path / "text.tar", "no tar at all")
    write(tmp_path / "text.parquet", "no table at all")
    write(tmp_path / "cut.parquet", table.read_bytes()[:-40])
    make_table(tmp_path / "none.parquet", [])
    make_tar(tmp_path / "none.tar", [])
    make_tar(tmp_path / "texts.tar", [("a.txt", b"a"), ("b.txt", b"b")])
    make_tar(tmp_path / "latin.tar", [("a.txt", b"caf\xe9"), ("a.png", images[0].read_bytes())])
    make_tar(tmp_path / "json.tar", [("a.png", images[0].read_bytes()), ("a.json", b'{"text": "a"}')])
    make_tar(tmp_path / "twice.tar", [("a.png", images[0].read_bytes())] * 2)
    write(tmp_path / "saved" / "train" / "data-00000-of-00001.arrow", "of Dataset.save_to_disk")
    write(tmp_path / "three.txt", "a\nb\u2028\nc\n")
    write(tmp_path / "tables" / "t.parquet", table.read_bytes())
    return tmp_path


MISTAKES = [
    (["tars/shard-0000.tar", "images"], "is a tar shard, and images is not one: name one kind alone"),
    (["tars/shard-0000.tar", "t.parquet"], "is a tar shard, and t.parquet is not one: name one kind alone"),
    (["images", "t.parquet"], "t.parquet is a table of images, and images is not one: name one kind alone"),
    (["x.tar.gz"], "x.tar.gz: is compressed, so that its images cannot be read at random: unpack it to a plain .tar"),
    (["packed.tar"], "packed.tar: compressed with gzip, so that samples cannot be read at random: unpack it"),
    (["gone.tar"], "gone.tar: cannot be read (no such file)"),
    (["gone.parquet"], "gone.parquet: cannot be read (no such file)"),
    (["text.tar"], "text.tar: cannot be read as a tar file ("),
    (["text.parquet"], "text.parquet: cannot be read as a table: "),
    (["cut.parquet"], "cut.parquet: cannot be read as a table: "),
    (["none.parquet"], "none.parquet: no images found there"),
    (["none.tar"], "none.tar: no images found there"),
    (["texts.tar"], "texts.tar: no images found there"),
    (["twice.tar"], "twice.tar: a.png is twice in one sample"),
    (["latin.tar"], "latin.tar#a.txt: the caption cannot be read ("),
    (["json.tar", "--caption-extension", "json"], 'json.tar#a.json: the caption must be a JSON text, or a text under'),
    (["t.parquet", "--image-column", "img"],
     "t.parquet: has no column 'img', but id, image, text: name the right one by --image-column"),
    (["t.parquet", "--caption-column", "caption"],
     "t.parquet: has no column 'caption', but id, image, text: name the right one by --caption-column"),
    (["t.parquet", "--image-column", "id"], "t.parquet: its column 'id' holds int64, not the bytes of image files"),
    (["t.parquet", "--image-column", "text"], "t.parquet: its column 'text' holds texts, not the bytes of image files"),
    (["t.parquet", "--caption-column", "id"], "t.parquet: its column 'id' holds int64, not texts"),
    (["t.parquet", "--caption-column", "image"], "t.parquet: its column 'image' holds struct<bytes: binary, path"),
    (["saved"], "00001.arrow: write them as Parquet (Dataset.to_parquet)"),
    (["hf://datasets/some/one"], "hf://datasets/some/one: has no Parquet files; the Hub's own copy in Parquet, if it "
     "made one, is at hf://datasets/some/one@~parquet"),
    (["tars"], f"tars: no images found there, but 1 file such as {Path('tars') / 'shard-0000.tar'}: name these"),
    (["tables"], f"tables: no images found there, but 1 file such as {Path('tables') / 't.parquet'}: name these"),
    (["tars/shard-0000.tar", "--image-column", "image"],
     "tars/shard-0000.tar holds images and captions: leave out --image-column"),
    (["t.parquet", "--caption-extension", "a"], "t.parquet holds images and captions: leave out --caption-extension"),
    (["images", "--caption-column", "text"], "each image has a file of its own: leave out --caption-column"),
    (["t.parquet", "--captions-file", "three.txt", "--caption-column", "text"],
     "--captions-file three.txt has the captions: leave out --caption-column"),
    (["tars/shard-0000.tar", "--captions-file", "three.txt", "--caption-extension", "json"],
     "--captions-file three.txt has the captions: leave out --caption-extension"),
    (["t.parquet", "--captions-file", "three.txt"], "three.txt has 3 lines for 4 images: give one per image, in order"),
    (["tars/shard-0000.tar", "--captions-file", "three.txt"], "three.txt has 3 lines for 4 images"),
    (["images", "--caption-extension", ""], "--caption-extension is '': give an ending such as .txt"),
    (["images", "--caption-extension", "../x"], "--caption-extension is '../x': give an ending such as .txt"),
    (["t.parquet", "--format", "npz", "--arch", "sd"],
     "t.parquet: npz files lie beside image files, and it holds many: use --format shards"),
    (["tars/shard-0000.tar", "--format", "npz", "--arch", "sd"],
     "tars/shard-0000.tar: npz files lie beside image files, and it holds many: use --format shards"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_a_mistake_is_one_line(here, run, monkeypatch, arguments, message) -> None:
    monkeypatch.setattr(sources, "list_remote", lambda *_: [])
    code, _, err = run(*arguments)
    assert message in err
    assert (code, err.strip().count("\n"), "Traceback" in err) == (2, 0, False)
    assert not (here / "out").exists() or not len(LatentStore(here / "out"))


def test_a_data_set_on_the_hub_is_its_parquet_files(monkeypatch) -> None:
    files = [f"hf://datasets/some/one/data/{k}.parquet" for k in range(2)]
    monkeypatch.setattr(sources, "list_remote", lambda *asked: files if asked[0] == "hf://datasets/some/one" else [])
    assert sources._tables_in(["hf://datasets/some/one"]) == files
    assert sources._tables_in(files) == files


def test_what_has_no_image_is_named_and_the_rest_is_encoded(here, run, caplog) -> None:
    image = (here / "images" / "img_000.png").read_bytes()
    other = (here / "images" / "img_001.png").read_bytes()
    make_tar(here / "odd.tar", [
        ("a.jpg", b"no image"), ("b.png", image[:200]), ("same.png", other), ("c.txt", b"only a text"),
        ("two.png", image), ("two.mask.png", other), ("same.png", image), ("deep/er/same.png", other),
    ])  # fmt: skip
    code, out, err = run("odd.tar")
    assert (code, encoded_counts(out)) == (2, (3, 0, 1))
    assert "odd.tar#b: " in err
    assert "odd.tar#a" in out + err
    assert "another image of its shard has the same name, and as in any tar the last one counts" in out + err
    assert "several images in 1 of the samples, of which the first is used: two" in caplog.text
    assert "no image in 1 of the samples, which are left out: c (txt)" in caplog.text
    store = LatentStore(here / "out")
    assert {source: store.entry(i).original_size for i, source in enumerate(store.strings("source"))} == {
        "odd.tar#same": (100, 60), "odd.tar#two": (100, 60), "odd.tar#deep/er/same": (60, 100),
    }  # fmt: skip

    rows = cells(sorted((here / "images").glob("*.png")))
    rows[1]["image"] = None
    rows[2]["image"] = {"bytes": None, "path": "images/img_002.png"}
    make_table(here / "holes.parquet", rows)
    code, out, err = run(
        "holes.parquet", "--collection", "table", "--captions-file", write(here / "four", "1\n2\n3\n4")
    )
    assert encoded_counts(out) == (2, 0, 0)
    for row in (1, 2):
        assert f"holes.parquet#{row}: no bytes of an image in this cell; a path alone is not followed" in out + err
    store = LatentStore(here / "out")
    assert [store.entry(i).caption for i in store.find(["holes.parquet#0", "holes.parquet#3"], "table")] == ["1", "4"]


def test_a_folder_and_a_file_in_it_are_read_once(here, run) -> None:
    code, out, _ = run("images", "tars/../images/img_000.png", "--caption-extension", "caption")
    assert (code, "4 encoded" in out) == (0, True)


@pytest.mark.long
def test_captions_by_every_ending(here, run) -> None:
    images = sorted((here / "images").glob("*.png"))
    for path in images:
        write(path.with_suffix(".json"), {"caption": f"{path.stem} as JSON"})
    make_tar(here / "both.tar", [
        (f"{path.stem}{end}", path.with_suffix(end).read_bytes()) for path in images for end in (".json", ".png")
    ])  # fmt: skip
    for k, (source, ending) in enumerate((source, e) for source in ("images", "both.tar") for e in (".json", "JSON")):
        assert run(source, "--caption-extension", ending.lower(), "--collection", f"c{k}")[0] == 0
        store = LatentStore(here / "out")
        captions = {store.entry(i).caption for i in store.in_collection(f"c{k}")}
        assert captions == {f"{path.stem} as JSON" for path in images}


def test_several_tables_and_shards_are_read_once_each(here, run) -> None:
    for source, other in (("t.parquet", "./t.parquet"), ("tars/shard-0000.tar", "tars/*.tar")):
        code, out, _ = run(source, other, source, "--collection", source)
        assert (code, encoded_counts(out)) == (0, (4, 0, 0))
