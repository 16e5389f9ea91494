"""Narrow terminals, files, and names that a terminal library might take for more than names."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kohya_bucket.buckets import bucket_set_to_toml, load_preset
from kohya_bucket.cli import app
from kohya_bucket.images import list_images
from kohya_bucket.texts import one_line
from tests.command_line import Command
from tests.pictures import make_pictures

NARROW = {"COLUMNS": "30", "FORCE_COLOR": "1", "TERM": "xterm"}
CONFIG = "[[datasets]]\nresolution = 512\nenable_bucket = true\n[[datasets.subsets]]\nimage_dir = '{}'\n"


def config_of(folder: Path, name: str) -> str:
    config = folder.parent / "c.toml"
    config.write_text(CONFIG.format(name), encoding="utf-8")
    return str(config)


def run(*arguments: str, env: dict[str, str] | None = None) -> str:
    return CliRunner().invoke(app, list(arguments), env=env).output


def test_no_number_is_lost_on_a_narrow_terminal(folder: Path) -> None:
    config = config_of(folder, str(folder))
    table = run("plan", config, env=NARROW).split("Dataset 1")[1]  # after the progress
    assert "…" not in table
    assert "448x576" in table
    rules = ("--rules", "kohya-no-upscale,auto-optimal", "--quiet")
    table = run("compare", str(folder), *rules, env=NARROW)
    assert "…" not in table
    assert "kohya-no-upscale" in table
    assert "832x256" in run("buckets", "chart", env=NARROW)


def test_sixty_columns_hold_every_table(folder: Path) -> None:
    sixty = {**NARROW, "COLUMNS": "60"}
    for command in (("plan", config_of(folder, str(folder))), ("analyze", str(folder), "--quiet")):
        said = re.sub(r"\x1b\[[0-9;]*m", "", run(*command, env=sixty)).splitlines()
        table = [line for line in said if re.match(r" *(bucket|\d+x\d+) ", line)]
        assert len(table) == 4
        assert max(map(len, table)) <= 60
        assert all("worst" in line or "%" in line for line in table)


def test_a_plan_fits_eighty_columns_and_names_what_fewer_leave_out(folder: Path) -> None:
    config = config_of(folder, str(folder))
    for width, missing in (("80", []), ("60", ["aspect", "full"])):
        plain = re.sub(r"\x1b\[[0-9;]*m", "", run("plan", config, env={**NARROW, "COLUMNS": width}))
        (head,) = (line.split() for line in plain.splitlines() if line.split()[:1] == ["bucket"])
        assert {"aspect", "full", "samples", "batches"} - {*head} == {*missing}
        assert all(f"{name}" in plain.partition("(without ")[2] for name in missing)
        assert ("(without " in plain) == bool(missing)


def test_paths_are_relative_where_they_were_given_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cut.png").write_bytes((folder / "0.png").read_bytes()[:10])
    monkeypatch.chdir(folder.parent)
    said = run("analyze", folder.name, "--quiet")
    assert f"{Path(folder.name) / 'cut.png'}: " in said
    assert str(folder) not in said


def test_a_name_with_colons_is_no_picture(folder: Path) -> None:
    assert "is not a folder" in run("plan", config_of(folder, "data:cat:x"))
    assert "data:cat:x" in run("plan", config_of(folder, "data:cat:x"))


def test_a_name_with_brackets_is_no_style(folder: Path) -> None:
    named = folder / "new [red] [" / "bold]"
    make_pictures(named, [(300, 400)])
    buckets = named / "set.toml"
    buckets.write_text(bucket_set_to_toml(load_preset("sdxl")), encoding="utf-8")
    compared = run("compare", str(named), "--rules", f"file:{buckets}")
    assert f"1 image of {named}, at" in compared.replace("\n", "")
    assert f"\nfile:{buckets} " in compared
    assert f"file:{buckets}" in run("simulate", "512x512", "--rule", f"file:{buckets}")
    assert f"  {named}: 1 image" in run("plan", config_of(folder, str(named)))


def test_no_path_is_broken_over_two_lines_of_a_file(folder: Path) -> None:
    long = folder / ("x" * 120 + ".png")
    long.write_bytes(b"no image")
    assert f"{long}: not an image" in run("analyze", str(folder))


FORGED = "error: forged"
HOSTILE = [
    f"a\n{FORGED}.png",
    "b\r\x1b[31mred\x1b]0;title\x07.png",
    "c\x9b2J\x7f\u202egnp.png",
    "d\u2066\u2028" + FORGED + "\u2069.png",
    "e\udce4.png",  # a byte that is no text
]
QUIET = ("--quiet",)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Images, sound and broken ones, in a folder; each name holds what a terminal obeys."""
    folder = tmp_path / "da\x1b[1mta"
    whole = make_pictures(folder, [(300, 400)])[0].read_bytes()
    for name in HOSTILE:
        (folder / name).write_bytes(whole)
        (folder / f"broken {name}").write_bytes(whole[:20])
    return folder


def assert_shown(text: str) -> None:
    assert text
    for line in text.splitlines():
        assert not line.strip().startswith(FORGED)
    assert one_line(text.replace("\n", "")) == text.replace("\n", "")


@pytest.mark.posix("Windows has no such names")
@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "CONFIG", "--images"),
        ("plan", "MISSING"),
        ("doctor", "CONFIG"),
        ("cache", "sizes", "FOLDER", "--output", "FOLDER/out.parquet"),
        ("cache", "sizes", "FOLDER", "--output", "FOLDER/0.png", *QUIET),
        ("analyze", "FOLDER", *QUIET),
        ("analyze", "--config", "CONFIG", *QUIET),
        ("analyze", "NOTHING"),
        ("simulate", "FOLDER/broken " + HOSTILE[0]),
        ("simulate", "512x512", "--rule", f"file:{HOSTILE[0]}"),
        ("simulate", "512x512", "--config", "CONFIG"),
        ("simulate", "512x512", "--" + HOSTILE[1]),
        ("simulate", "512x512", HOSTILE[1]),
        ("simulate", "512x512", "--min-bucket-reso", HOSTILE[1]),
        (HOSTILE[1],),
        ("--" + HOSTILE[1],),
        ("compare", "FOLDER", "--rules", HOSTILE[0]),
        ("compare", "NOTHING"),
        ("buckets", "chart", "FOLDER", "--output", "FOLDER/chart.svg"),
        ("buckets", "list", HOSTILE[1]),
    ],
    ids=repr,
)
def test_no_name_writes_to_the_terminal_as_it_likes(command_line: Command, hostile: Path, arguments: list[str]) -> None:
    config = hostile.parent / "c\x1b[5m.toml"
    config.write_text(CONFIG.format(hostile).replace("'", '"').replace("\x1b", "\\u001b"), encoding="utf-8")
    for found, text in (
        ("CONFIG", config),
        ("FOLDER", hostile),
        ("MISSING", hostile / "x\n.toml"),
        ("NOTHING", hostile / f"\n{FORGED}"),
    ):
        arguments = [word.replace(found, str(text)) for word in arguments]
    _, out, errors = command_line(*arguments)
    assert_shown(out + errors)


@pytest.mark.posix("Windows has no such names")
def test_a_list_of_bad_files_can_be_read_whatever_their_names_are(hostile: Path) -> None:
    listed = hostile.parent / "bad.txt"
    result = CliRunner().invoke(app, ["analyze", str(hostile), "--quiet", "--list-bad", str(listed)])
    assert "3 names have a line break or bytes that are no text" in result.output
    assert list_images(listed) == [str(hostile / f"broken {name}") for name in (HOSTILE[2], HOSTILE[3])]


@pytest.mark.posix("Windows has no such names")
def test_json_has_names_as_they_are(command_line: Command, hostile: Path) -> None:
    config = hostile.parent / "c.toml"
    config.write_text(CONFIG.format(hostile).replace("'", '"').replace("\x1b", "\\u001b"), encoding="utf-8")
    _, out, _ = command_line("plan", config, "--images", "--json")
    dataset = json.loads(out)["datasets"][0]
    assert {row["key"] for row in dataset["image_rows"]} == {str(hostile / name) for name in [*HOSTILE, "0.png"]}
    assert {row["image"] for row in dataset["not_trained"]} == {str(hostile / f"broken {name}") for name in HOSTILE}
