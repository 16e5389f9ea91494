"""Commands on tar shards."""

import json
import tarfile
from pathlib import Path

import pytest

from kohya_bucket.images.tar_index import TarIndex
from tests.command_line import command_line  # noqa: F401
from tests.datasets.test_shard_lists import SIZES, make_tar
from tests.pictures import png_header


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, list[str]]:
    """The same shards, named in each way."""
    tars = [make_tar(tmp_path / f"x-{n}.tar", SIZES * 2) for n in range(2)]
    return {"tars": [str(tar) for tar in tars], "pattern": [str(tmp_path / "x-*.tar")]}


@pytest.mark.parametrize("way", ["tars", "pattern"])
def test_every_way_of_naming_shards_gives_the_same(command_line, sources, tmp_path, way) -> None:  # noqa: F811
    code, shown, _ = command_line("analyze", *sources[way], "--json", "--html", tmp_path / "page.html")
    assert code == 0
    found = json.loads(shown)["datasets"][0]
    assert (found["images"]["found"], found["images"]["readable"]) == (12, 12)
    assert "x-0.tar" in (tmp_path / "page.html").read_text(encoding="utf-8")
    code, shown, _ = command_line("compare", *sources[way])
    assert code == 0
    assert shown.startswith("12 images of ")
    kept = tmp_path / "kept.parquet"
    for again in ([], [], ["--refresh"]):
        code, shown, _ = command_line("cache", "sizes", *sources[way], "--output", kept, *again)
        assert code == 0
        assert shown.startswith("12 images of 2 shards in ")
    assert TarIndex.load(kept).sizes.tolist() == [list(size) for size in SIZES * 4]


@pytest.mark.parametrize(
    ("command", "option"),
    [("analyze", "--decode"), ("analyze", "--hash"), ("analyze", "--cache"), ("cache sizes", "--hash")],
)
def test_more_than_headers_is_refused(command_line, sources, tmp_path, command, option) -> None:  # noqa: F811
    kept = [tmp_path / "kept.parquet"]
    output = ["--output", *kept] if command == "cache sizes" else []
    code, _, errors = command_line(*command.split(), *sources["tars"], *output, option, *kept * (option == "--cache"))
    assert code == 2
    assert f"only headers are read: leave out {option}" in errors


def test_fix_is_not_advised_for_images_in_a_tar(command_line, tmp_path) -> None:  # noqa: F811
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, content in (("a.png", png_header(300, 400)), ("b.png", b"no image")):
            (tmp_path / name).write_bytes(content)
            tar.add(tmp_path / name, name)
    _, shown, _ = command_line("analyze", tmp_path / "x.tar")
    assert "1 unreadable → repair or remove\n" in shown


def test_nothing_else_beside_shards(command_line, sources, tmp_path) -> None:  # noqa: F811
    (tmp_path / "folder").mkdir()
    code, _, errors = command_line("analyze", sources["tars"][0], tmp_path / "folder")
    assert code == 2
    assert "name one kind alone" in errors
