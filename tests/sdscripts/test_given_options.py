"""Which of a trainer's options are given, on its command line or in the file that this names."""

import pytest

from kohya_bucket.sdscripts.unknown import given_options


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ([], set()),
        (["model"], set()),
        (["--resume", "state", "--seed=3"], {"resume", "seed"}),
        (["--config_file"], {"config_file"}),
    ],
)
def test_of_the_command_line(arguments, given):
    assert given_options(arguments) == given


@pytest.mark.parametrize("spelling", [["--config_file", "FILE.toml"], ["--config_file=FILE"]])
def test_of_the_file_that_it_names(tmp_path, spelling):
    (tmp_path / "a.toml").write_text("seed = 3\n[training]\nresume = 'state'\nsdpa = false\n", encoding="utf-8")
    given = given_options([word.replace("FILE", str(tmp_path / "a")) for word in spelling])
    assert given == {"config_file", "training", "seed", "resume"}
