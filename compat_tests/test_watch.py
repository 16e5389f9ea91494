"""What is seen of a change in sd-scripts' sources, and what is none."""

import json
import textwrap

import pytest
import watch

SEAMS = [("buckets", "Manager.place"), ("batches", "Data"), ("loading", "find"), ("caching", "Strategy.path")]
BEFORE = {
    "library/train_util.py": '''
        class Manager:
            """Places."""
            def place(self, width, height):
                """One image."""
                return self.rule(width, height)  # a comment

        class Data:
            count = 1

        def find(folder, base="*"):
            return [folder]
    ''',
    "library/strategy_base.py": """
        class Base:
            def path(self):
                return self.file

        class Strategy(Base):
            pass
    """,
}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Makes checkouts of the sources above, with some text in them replaced."""
    monkeypatch.setattr(watch, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(watch, "watched", lambda _: SEAMS)

    def make(name, *changes, date="2026-01-01", **files):
        root = tmp_path / name
        (root / "library").mkdir(parents=True)
        (root / "train_network.py").touch()
        (root / ".laid").write_text(f"0 {date}", encoding="utf-8")
        for file, text in {**BEFORE, **files}.items():
            text = textwrap.dedent(text)
            for old, new in changes:
                text = text.replace(old, new)
            (root / file).write_text(text, encoding="utf-8")
        return str(root)

    return make


def compared(*arguments):
    return watch.main(list(arguments))


def test_comments_docstrings_layout_and_other_code_do_not_count(checkout, capsys):
    assert compared("--record", checkout("v1")) == 0
    changes = [("Places.", "Places images."), ("  # a comment", ""), ("width, height)", "width,\n height)")]
    same = checkout("v2", *changes, ("class Manager:", "import os\n\ndef other():\n    pass\n\nclass Manager:"))
    assert compared(same) == 0
    assert "4 seams, 0 differ from v1" in capsys.readouterr().out


def test_each_change_is_named_with_its_place(checkout, capsys):
    compared("--record", checkout("v1"))
    changes = [
        ("def place(self, width, height):", "def place(self, width, height=1, *, flip):"),
        ("self.rule", "self.ask"),
    ]
    changed = checkout("v2", *changes, ("count = 1", "count = 1; more = 2"), ("class Base:", "class Older:"))
    assert compared(changed) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "3 differ from v1" in next(line for line in lines if "differ" in line)
    text = "\n".join(lines)
    assert "takes (self, width, height=, *, flip), took (self, width, height); new: ask; gone: rule" in text
    assert "library/train_util.py:4" in text
    assert "new: more" in text  # a class is compared by its members
    assert "was in library/strategy_base.py  gone" in text


def test_of_a_class_the_members_that_changed_are_named(checkout, capsys, monkeypatch):
    monkeypatch.setattr(watch, "watched", lambda _: [("buckets", "Manager")])
    compared("--record", checkout("v1"))
    assert compared(checkout("v2", ("self.rule", "self.ask"))) == 1
    assert "changed: place" in capsys.readouterr().out


def test_of_a_trainer_only_its_count_of_steps_is_compared(checkout, capsys, monkeypatch):
    monkeypatch.setattr(watch, "watched", lambda _: [("resuming", "NetworkTrainer.train")])
    trainer = """
        class NetworkTrainer:
            def train(self, args):
                initial_step = args.initial_step
                print("one thing")
                initial_step -= 1
    """
    first = checkout("v1", **{"train_network.py": trainer})
    compared("--record", first)
    assert compared(checkout("v2", ("one thing", "another thing"), **{"train_network.py": trainer})) == 0
    assert compared(checkout("v3", ("initial_step -= 1", "initial_step -= 2"), **{"train_network.py": trainer})) == 1
    assert "new: -=2; gone: -=1" in capsys.readouterr().out


def test_what_only_moved_is_no_difference(checkout, capsys):
    compared("--record", checkout("v1"))
    moved = checkout("v2", **{"library/dataset.py": BEFORE["library/train_util.py"], "library/train_util.py": ""})
    assert compared(moved) == 0
    assert "3 moved from library/train_util.py to library/dataset.py" in capsys.readouterr().out


def test_the_nearest_version_is_compared_and_a_known_change_is_named(checkout, capsys):
    old = checkout("v1")
    new = checkout("v2", ("self.rule", "self.ask"), ("return [folder]", "return [base]"), date="2026-02-02")
    compared("--record", old, new)
    mixed = checkout("v3", ("return [folder]", "return [base]"), ("count = 1", "count = 2"))
    assert compared(mixed) == 1
    out = capsys.readouterr().out
    assert "2 differ from v2 (2026-02-02), the nearest of 2 recorded versions; 1 as in none of them" in out
    assert "as in v1" in out


def test_a_version_that_is_recorded_again_leaves_nothing_behind(checkout, tmp_path):
    compared("--record", checkout("v1"))
    before = json.loads(watch.RECORD.read_text(encoding="utf-8"))
    changed = checkout("sub/v1", ("self.rule", "self.ask"))
    compared("--record", changed)
    after = json.loads(watch.RECORD.read_text(encoding="utf-8"))
    assert len(after["code"]) == len(before["code"])
    assert after != before


@pytest.mark.parametrize(("arguments", "said"), [(["nowhere"], "is not a checkout"), (["V1"], "nothing is recorded")])
def test_mistakes_are_one_line(checkout, capsys, arguments, said):
    assert compared(*[checkout("v1") if word == "V1" else word for word in arguments]) == 2
    assert said in capsys.readouterr().err


def test_musubi_tuner_is_compared_with_its_own_versions(checkout, tmp_path, capsys):
    def musubi(name, body):
        data = tmp_path / name / "src" / "musubi_tuner" / "dataset"
        data.mkdir(parents=True)
        (data / "bucket.py").write_text(f"def find(folder):\n    return {body}\n", encoding="utf-8")
        return str(tmp_path / name)

    compared("--record", checkout("v1"), musubi("v0.3", "folder.name"))
    assert compared(musubi("v0.4", "folder.name")) == 0
    assert compared(musubi("v0.5", "folder.stem")) == 1
    out = capsys.readouterr().out
    assert "musubi-v0.5: 4 seams, 1 differ from musubi-v0.3" in out
    assert "src/musubi_tuner/dataset/bucket.py:1  new: stem; gone: name" in out


@pytest.mark.parametrize("trainer", ["sd-scripts", "musubi-tuner"])
def test_every_seam_is_recorded_of_the_versions_that_have_it(trainer):
    record = json.loads(watch.RECORD.read_text(encoding="utf-8"))
    versions = {
        name: one for name, one in record["versions"].items() if name.startswith("musubi-") == ("musubi" in trainer)
    }
    found = {name for version in versions.values() for name in version["seams"]}
    inherited = {"DatasetGroup.__getitem__", "DatasetGroup.__len__"}  # torch's
    assert found | inherited >= {name for _, name in watch.watched(trainer)}
