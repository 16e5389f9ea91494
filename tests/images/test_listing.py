"""Which files count as the images of a dataset."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kohya_bucket.checks import path_meant
from kohya_bucket.errors import KohyaBucketError, UnreadableError
from kohya_bucket.images import MetadataCache, list_images, read_sizes
from kohya_bucket.images.listing import absolute_paths, are_there, refuse_if_away
from kohya_bucket.trainers.sdscripts.dataset_images import read_folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.jpg", "a.PNG", "sub/c.webp", "sub/deep/d.jpeg", "a.txt", "notes.md", "[x] y.png", ".png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "folder.png").mkdir()
    return tmp_path


def names(tree: Path, found: list[str]) -> list[str]:
    return [Path(path).relative_to(tree).as_posix() for path in found]


def test_folders(tree: Path) -> None:
    assert names(tree, list_images(tree)) == ["[x] y.png", "a.PNG", "b.jpg", "sub/c.webp", "sub/deep/d.jpeg"]
    assert names(tree, list_images(tree, recursive=False)) == ["[x] y.png", "a.PNG", "b.jpg"]
    assert names(tree, list_images(tree, extensions=[".WEBP"])) == ["sub/c.webp"]


def test_patterns_files_and_lists(tree: Path) -> None:
    assert names(tree, list_images(str(tree / "*.jpg"))) == ["b.jpg"]
    assert names(tree, list_images(tree / "notes.md")) == ["notes.md"]
    assert names(tree, list_images(tree / "[x] y.png")) == ["[x] y.png"]
    (tree / "list.txt").write_text("# mine\n\nsub/c.webp\nb.jpg\nsub/c.webp\n", encoding="utf-8")
    assert names(tree, list_images(tree / "list.txt")) == ["sub/c.webp", "b.jpg"]
    (tree / "list.txt").write_text("s3://bucket/a.jpg\nb.jpg\n", encoding="utf-8")
    assert list_images(tree / "list.txt") == ["s3://bucket/a.jpg", str(tree / "b.jpg")]


def test_several_sources_without_repetition(tree: Path) -> None:
    assert names(tree, list_images([tree / "b.jpg", tree / "sub", str(tree / "*.jpg")])) == [
        "b.jpg",
        "sub/c.webp",
        "sub/deep/d.jpeg",
    ]


def test_a_missing_source_is_named(tree: Path) -> None:
    with pytest.raises(KohyaBucketError, match="absent: no such file or folder"):
        list_images(tree / "absent")
    for meant, typed in (("sub", "sbu"), ("sub", "sbu/deep"), ("b.jpg", "bb.jpeg"), (Path("sub") / "deep", "deep")):
        with pytest.raises(KohyaBucketError, match=re.escape(f"'{tree / meant}'?")):
            list_images(tree / typed)


def test_what_is_there_is_not_meant_again(tree: Path) -> None:
    assert str(tree / "b.jpg") in path_meant(tree / "b.jpeg")
    assert str(tree / "b.jpg") not in path_meant(tree / "b.jpg")
    assert path_meant(tree / "bb" / "c.jpg") == "correct the path"  # a file is no folder


def test_a_path_as_it_was_pasted_is_understood(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PICTURES", str(tree))
    for pasted in (f'"{tree / "b.jpg"}"', f"'{tree / 'b.jpg'}'", f'{tree / "b.jpg"}"', "%PICTURES%/b.jpg"):
        assert path_meant(pasted) == f"did you mean '{tree / 'b.jpg'}'?"


@pytest.mark.posix("links need rights on Windows")
def test_a_missing_source_in_many_missing_folders_is_named() -> None:
    with pytest.raises(KohyaBucketError, match="no such file"):
        list_images("no/" * 1500)


def test_links_in_a_circle_end(tree: Path) -> None:
    (tree / "sub" / "up").symlink_to(tree, target_is_directory=True)
    assert len(list_images(tree)) == 5


@pytest.mark.parametrize("extensions", ["png", ".png", ["png"]])
def test_endings_without_their_dot_are_refused(tree: Path, extensions) -> None:
    with pytest.raises(KohyaBucketError, match=r"extensions holds '\.?png': give a list of endings with the dot"):
        list_images(tree, extensions=extensions)


def test_a_list_that_is_no_text_is_named(tree: Path) -> None:
    (tree / "list.txt").write_bytes("grün.png".encode("latin-1"))
    with pytest.raises(KohyaBucketError, match=r"list\.txt is not UTF-8"):
        list_images(tree / "list.txt")


def test_one_path_is_not_read_letter_by_letter(tree: Path) -> None:
    for read in (read_sizes, MetadataCache.build):
        with pytest.raises(KohyaBucketError, match=r"'.*b\.jpg': give a list"):
            read(tree / "b.jpg")
        with pytest.raises(KohyaBucketError, match=r"'.*b\.jpg': give a list"):
            read("b.jpg")


def test_full_paths_leave_urls_as_they_are() -> None:
    assert absolute_paths(["s3://a/../b", "a.png"]) == ["s3://a/../b", os.path.abspath("a.png")]  # noqa: PTH100


def test_what_the_trainers_lists_leave_out_is_left_out(tmp_path: Path) -> None:
    names = [
        "a.png", "._a.png", ".hidden.png", "sub/c.png", "sub/.d.png", ".ipynb_checkpoints/a-checkpoint.png",
        "__MACOSX/b.png", "__MACOSX/._a.png",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list_images(tmp_path) == [str(tmp_path / name) for name in ("a.png", Path("sub", "c.png"))]
    assert list_images(tmp_path, recursive=False) == read_folder(str(tmp_path)).images == [str(tmp_path / "a.png")]
    assert list_images(tmp_path / "__MACOSX") == [str(tmp_path / "__MACOSX" / "b.png")]  # named outright


def refusing(call: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """A call of the system that gets no answer about one path."""

    def asked(name: Any, *rest: Any, **options: Any) -> Any:
        if os.path.normpath(os.fspath(name)) == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return call(name, *rest, **options)

    return asked


def test_a_folder_of_which_nothing_is_known_is_not_left_out(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list_images(tree)
    monkeypatch.setattr(os, "stat", refusing(os.stat, tree / "sub"))
    assert list_images(tree) == found
    monkeypatch.setattr(os, "scandir", refusing(os.scandir, tree / "sub"))
    with pytest.raises(KohyaBucketError, match="this folder cannot be listed"):
        list_images(tree)


@pytest.mark.parametrize("pattern", ["**/*.*", "*/*.webp", "su*/**/*.webp", "**"])
def test_a_pattern_leaves_out_nothing_of_which_nothing_is_known(
    tree: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    found = list_images(str(tree / pattern))
    assert str(tree / "sub" / "c.webp") in found
    monkeypatch.setattr(os, "stat", refusing(os.stat, tree / "sub" / "c.webp"))
    assert list_images(str(tree / pattern)) == found
    monkeypatch.setattr(os, "scandir", refusing(os.scandir, tree / "sub"))
    with pytest.raises(KohyaBucketError, match=r"sub.?: this folder cannot be listed"):
        list_images(str(tree / pattern))


def test_what_is_in_a_folder_of_which_nothing_is_known_is_not_said(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(tree / name) for name in ("b.jpg", "b.txt", "gone/a.txt", "a.txt/b", "sub/c.webp", "a\0/b")]
    assert are_there(paths) == [True, False, False, False, True, False]
    monkeypatch.setattr(os, "listdir", refusing(os.listdir, tree / "sub"))
    with pytest.raises(UnreadableError, match="run again"):
        are_there(paths)


@pytest.mark.parametrize("count", [12, 60, 300])
def test_many_files_that_are_gone_are_no_fault_of_their_own(tmp_path: Path, count: int) -> None:
    """A tenth of a folder, and at least ten; those that are back do not count."""
    paths = [tmp_path / f"{number:03d}.png" for number in range(count)]
    for path in paths:
        path.touch()
    back = [tmp_path / f"back{number}.png" for number in range(9)]
    for path in back:
        refuse_if_away(str(path), FileNotFoundError())
    for path in back:
        path.touch()
    least = max(10, -(-(count + 9) // 10))
    for path in paths[: least - 1]:
        path.unlink()
        refuse_if_away(str(path), FileNotFoundError())
        refuse_if_away(str(path), FileNotFoundError())  # which counts once
    paths[least - 1].unlink()
    with pytest.raises(UnreadableError, match=f"{least} of {count + 9} files of .* have gone: {least - 1:03d}.png"):
        refuse_if_away(str(paths[least - 1]), FileNotFoundError())
