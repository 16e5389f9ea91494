"""Files that trainers misread: every command counts the same, and names the command that mends them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.command_line import Command, command_line  # noqa: F401
from tests.reported.case import reported

KINDS = ("sound", "torn", "no image", "GIF", ".Png", "turned", "deep", "transparent", "cp1252")


def make(folder: Path, name: str, kind: str, draws: np.random.Generator) -> None:
    pixels = draws.integers(0, 256, (48, 64, 4), dtype=np.uint8)
    pixels[..., 3] = 0 if kind == "transparent" else 255
    picture = Image.fromarray(pixels if kind == "transparent" else pixels[..., :3].copy())
    path, options = folder / f"{name}.png", dict[str, Any]()
    if kind == "turned":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = int(draws.integers(2, 9))
        path = path.with_suffix(".jpg")
    elif kind == "deep":
        picture = Image.fromarray(draws.integers(0, 65536, (48, 64), dtype=np.uint16))
    elif kind in ("GIF", ".Png"):
        path = path.with_suffix(".gif" if kind == "GIF" else kind)
    picture.save(path, **options)
    if kind in ("torn", "no image"):
        path.write_bytes(path.read_bytes()[:700] if kind == "torn" else b"no image")
    path.with_suffix(".txt").write_bytes(b"caf\xe9" if kind == "cp1252" else b"a cat")


CONFIGS = {
    "s.toml": "[[datasets]]\nresolution = 64\nenable_bucket = true\nmin_bucket_reso = 64\nmax_bucket_reso = 128\n"
    "[[datasets.subsets]]\nimage_dir = 'data'\ncaption_extension = '.txt'\n",
    "m.toml": "[[datasets]]\nresolution = 64\nenable_bucket = true\nimage_directory = 'data'\n"
    "caption_extension = '.txt'\n",
}


@reported(
    "one folder, and another number of broken images from every command",
    trainer="sd-scripts and musubi-tuner stop at the first broken image or caption, list no TIFF, GIF, HEIC and .Jpg, "
    "take the pixels of sideways photos as they are stored, and read 16-bit grey as white",
    here="`analyze --decode`, `plan`, `doctor` and `explore` count alike, and each finding that `kohya-bucket fix` "
    "mends names that command with the folder",
    command="kohya-bucket doctor my.toml",
    origin="what 12 made-up folders were made of",
)
@pytest.mark.parametrize("seed", range(3))
def test_every_command_counts_alike(
    command_line: Command,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(seed)
    Path("data").mkdir()
    kinds = ["sound", *draws.choice(KINDS, 14).tolist()]
    for number, kind in enumerate(kinds):
        make(Path("data"), f"{number:02d}", kind, draws)
    made = Counter(kinds)
    unlisted, broken = made["GIF"] + made[".Png"], made["torn"] + made["no image"]

    (folder,) = json.loads(command_line("analyze", "data", "--decode", "--json")[1])["datasets"]
    counts = [folder[name]["count"] for name in ("broken", "not_listed", "misread", "exif_rotated")]
    assert counts == [broken, unlisted, made["deep"] + made["transparent"], made["turned"]]
    (by_headers,) = json.loads(command_line("analyze", "data", "--json")[1])["datasets"]
    assert by_headers["images"]["broken"] == made["no image"]
    for name, text in CONFIGS.items():
        Path(name).write_text(text, encoding="utf-8")
        arch = ("--arch", "qi") if name == "m.toml" else ()
        (planned,) = (plan := json.loads(command_line("plan", name, "--json", *arch)[1]))["datasets"]
        assert len(planned["not_trained"]) == made["no image"]
        sections = json.loads(command_line("doctor", name, "--json", *arch)[1])["sections"]
        found = {one["code"]: one for section in sections for one in section["findings"]}
        decoded = made["torn"], made["deep"], made["transparent"]
        headers = unlisted, made["turned"], made["cp1252"]
        assert (
            tuple(found.get(code, {"count": 0})["count"] for code in ("undecodable", "deep-grey", "transparent"))
            == decoded
        )
        codes = "ignored-files", "turned", "broken-caption"
        for findings in (found, {one["code"]: one for one in plan["findings"]}):
            assert tuple(findings.get(code, {"count": 0})["count"] for code in codes) == headers
            mended = [
                findings[code]
                for code in (*codes, "deep-grey", "undecodable", "not-trained", "left-out")
                if code in findings
            ]
            assert all("`kohya-bucket fix data`" in one["remedy"] for one in mended)
            assert all(Path(path).is_file() for one in mended if one["code"] in codes for path in one["names"])
