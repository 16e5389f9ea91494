"""What a new part of each kind touches: a toy is added to a copy of the package, in as few files as the docs say.

Then it must be known everywhere: to Python, to commands, to configs and, where there is one, to saved states. A new
trainer is `tests/trainers/door/toy_door.py`.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Walk:
    """A copy of the package that is changed, and the files in which it was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changed: set[str] = set()
        shutil.copytree(ROOT / "kohya_bucket", folder / "kohya_bucket", ignore=shutil.ignore_patterns("__pycache__"))

    def new(self, file: str, text: str) -> None:
        self.changed.add(file)
        (self.folder / "kohya_bucket" / file).write_text(textwrap.dedent(text), encoding="utf-8")

    def insert(self, file: str, before: str, text: str) -> None:
        """Put lines in front of the only line that begins so."""
        path = self.folder / "kohya_bucket" / file
        lines = path.read_text(encoding="utf-8").splitlines()
        (at,) = [i for i, line in enumerate(lines) if line.startswith(before)]
        self.new(file, "\n".join([*lines[:at], text, *lines[at:]]) + "\n")

    def run(self, script: str) -> str:
        """The output of a program that uses the changed package."""
        paths = os.pathsep.join(map(str, (self.folder, ROOT)))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], cwd=self.folder, capture_output=True, text=True,
            check=False, env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "TERM": "dumb"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def walk(tmp_path: Path) -> Walk:
    return Walk(tmp_path)


COMMAND = """
    import json
    from typer.testing import CliRunner
    from kohya_bucket.cli import app

    def command(*arguments):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output
"""


@pytest.mark.long
def test_a_rule_with_an_option_of_its_own_is_three_files(walk: Walk) -> None:
    walk.new(
        "buckets/rules/toy.py",
        """
        import numpy as np
        from kohya_bucket.buckets.rule import OwnSizes, RuleBase

        class ToyBuckets(RuleBase):
            def __init__(self, step, margin):
                self.step, self.margin = step, margin

            def _assign(self, sizes):
                inner = sizes - self.margin
                small = inner.min(axis=1, initial=self.step) < self.step
                return OwnSizes(sizes, inner // self.step * self.step, small.astype(np.uint8), self.step)

        def toy_rule(request):
            return ToyBuckets(request.reso_steps, request.margin)
        """,
    )
    walk.insert(
        "buckets/rules/registry.py",
        '    "preset": NamedRule(',
        '    "toy": NamedRule(text="a toy", home=f"{_HERE}.toy:toy_rule", accepted_options=frozenset({"margin"})),',
    )
    walk.insert(
        "buckets/choices.py",
        "    num_buckets: int",
        '    margin: int = option(0, whole_number(0), implied=(0,), help="Pixels of the toy.")',
    )
    assert len(walk.changed) <= 3
    out = walk.run(
        COMMAND
        + """
    from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, rule_for
    from kohya_bucket.trainers.door.options import AdapterOptions
    from kohya_bucket.buckets import rule_from_name

    print(rule_from_name("toy", max_reso=512, margin=40).assign(512, 300))
    options = AdapterOptions.from_tables(("a config", {"rule": "toy", "margin": 40}))
    print(rule_for(DatasetKeys((512, 512), True), options).assign(512, 300))
    (found,) = json.loads(command("simulate", "512x300", "--rule", "toy", "--margin", 40, "--json"))
    print(found["bucket"])
    for give in ({"margin": 40}, {"rule": "toy", "margin": -1}):
        try:
            rule_for(DatasetKeys((512, 512), True), AdapterOptions.from_tables(("a config", give)))
        except Exception as error:
            print(error)
    print("Pixels of the toy" in command("simulate", "--help-all"))
    """
    ).splitlines()
    assert out[:3] == ["448x256", "448x256", "{'width': 448, 'height': 256}"]
    assert out[3].startswith("margin is 40, which only the rule toy has")
    assert "margin is -1" in out[4]
    assert out[5] == "True"


@pytest.mark.long
def test_the_rule_of_the_page_is_known_to_commands_and_configs(walk: Walk) -> None:
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    parts = re.findall(r"<!-- (?:rule|entry): ([^\n]+) -->\n```\w*\n(.*?)```", page, re.DOTALL)
    (file, text), (before, entry) = parts
    walk.new(file.removeprefix("kohya_bucket/"), text)
    walk.insert("buckets/rules/registry.py", f"    {before}", entry.rstrip())
    out = walk.run(
        COMMAND
        + """
    import numpy as np
    from kohya_bucket.buckets import Reason
    from kohya_bucket.buckets.rules.floored import FlooredBuckets
    from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, rule_for
    from kohya_bucket.trainers.door.options import AdapterOptions

    (found,) = json.loads(command("simulate", "1000x700", "--rule", "floored", "--json"))
    print(found["bucket"]["width"], found["bucket"]["height"])
    options = AdapterOptions.from_tables(("a config", {"rule": "floored"}))
    print(rule_for(DatasetKeys((512, 512), True, bucket_reso_steps=32), options).assign(1000, 700))
    placement = FlooredBuckets(64).place([(1000, 700), (60, 700), (0, 0)])
    print([reason.name for reason in map(Reason, placement.reasons.tolist())])
    """
    ).splitlines()
    assert out == ["960 640", "992x672", "['PLACED', 'TOO_SMALL', 'UNREADABLE']"]
    assert "then says 960x640" in page


@pytest.mark.long
def test_a_remainder_policy_is_two_files(walk: Walk) -> None:
    walk.insert("planning/ledger.py", "    CAUGHT = 6", "    FIRST = 7")
    walk.insert(
        "planning/ledger.py", '    LedgerReason.NO_BUCKET: "it has', '    LedgerReason.FIRST: "a toy repeats it",'
    )
    walk.insert(
        "planning/remainders.py",
        "REMAINDERS: dict",
        textwrap.dedent(
            '''
            def _first(demand, context):
                """Fill the last batch of each bucket with its first image."""
                buckets, rows = np.unique(demand.bucket, return_index=True)
                missing = (-demand.per_bucket() % context.global_batch)[buckets]
                rows, missing = rows[missing > 0], missing[missing > 0]
                changes = [change_of(demand, np.repeat(rows, missing), +1)] if len(rows) else []
                return demand.changed(rows, missing), changes


            FIRST = RemainderPolicy("first", "repeats its first image", _first, LedgerReason.FIRST)
            '''
        ),
    )
    path = walk.folder / "kohya_bucket" / "planning" / "remainders.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("(KEEP, PAD, DROP,", "(KEEP, FIRST, PAD, DROP,"), encoding="utf-8")
    assert len(walk.changed) <= 2
    out = walk.run(
        COMMAND
        + """
    import numpy as np
    from kohya_bucket.trainers.door.options import AdapterOptions
    from kohya_bucket.planning import plan_epoch

    ids = [0, 0, 0, 1, 1]
    plan = plan_epoch(ids, 4, remainder="first")
    print(np.bincount(np.concatenate([plan.step_indices(i) for i in range(plan.steps)]), minlength=5).tolist())
    print(plan.ledger())
    print({row["reason"] for row in plan.ledger().rows()})
    print(AdapterOptions.from_tables(("a config", {"remainder": "first"})).remainder)
    """
    ).splitlines()
    assert out == ["[2, 1, 1, 3, 1]", "5 images, 0 missed, 3 repeated", "{'a toy repeats it'}", "first"]


@pytest.mark.long
def test_an_image_format_is_two_files(walk: Walk) -> None:
    walk.insert("images/formats.py", "    OTHER = 10", "    QOI = 11")
    walk.insert("images/formats.py", '    ImageFormat.JXL: (".jxl",)', '    ImageFormat.QOI: (".qoi",),')
    walk.insert(
        "images/formats.py", "    return ImageFormat.UNKNOWN\n"[:-1],
        '    if head.startswith(b"qoif"):\n        return ImageFormat.QOI',
    )  # fmt: skip
    walk.insert(
        "images/headers.py",
        "def read_header(path",
        textwrap.dedent(
            """
            def read_qoi(head, source):
                return (*struct.unpack(">II", head[4:12]), 1, ImageFormat.QOI) if head[:4] == b"qoif" else None


            _readers[ord("q")] = read_qoi
            """
        ),
    )
    assert len(walk.changed) <= 2
    (walk.folder / "pictures").mkdir()
    header = b"qoif" + (300).to_bytes(4, "big") + (200).to_bytes(4, "big") + b"\x03\x00"
    (walk.folder / "pictures" / "one.qoi").write_bytes(header + b"\xfe\x01\x02\x03" + b"\xc0" * 8 + b"\0" * 7 + b"\x01")
    out = walk.run(
        COMMAND
        + """
    from kohya_bucket.images import MetadataCache, list_images, read_sizes

    (path,) = list_images("pictures")
    print(read_sizes([path]).sizes.tolist())
    print(MetadataCache.build([path]).get(path).format.name)
    (found,) = json.loads(command("simulate", path, "--json"))
    print(found["bucket"])
    """
    ).splitlines()
    assert out == ["[[300, 200]]", "QOI", "{'width': 640, 'height': 384}"]


@pytest.mark.weekly
def test_a_latent_family_is_two_files(walk: Walk) -> None:
    """What its autoencoder makes; and what sd-scripts calls its files and its trainers."""
    walk.insert("latents/families.py", '        ModelFamily("sdxl"', '        ModelFamily("toy", "Toy", 8, 4),')
    walk.insert(
        "trainers/sdscripts/families.py",
        '        _family("sdxl"',
        '        _family("toy", "_toy.npz", {"toy_train.py": 16}),',
    )
    assert len(walk.changed) <= 2
    out = walk.run(
        COMMAND
        + """
    from pathlib import Path
    from kohya_bucket.latents import precompute_latents
    from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
    from tests.latents.stub_encoders import MeanEncoder, dataset_of, make_images

    paths = make_images(Path("pictures"), [(100, 60), (64, 64)])
    made = precompute_latents(dataset_of(paths), MeanEncoder(), NpzFiles("toy"))
    print(made.encoded, sorted(file.name for file in Path("pictures").glob("*.npz")))
    try:
        command("cache", "export", "store", "--arch", "none")
    except Exception as error:
        print("toy" in str(error))
    from kohya_bucket.trainers.sdscripts.families import trainer_named
    print(trainer_named("toy_train.py").refusing(8))
    """
    ).splitlines()
    assert out == ["2 ['img_000_0100x0060_toy.npz', 'img_001_0064x0064_toy.npz']", "True", "{'toy_train.py': 16}"]


def test_an_option_of_rules_is_named_where_it_means_something() -> None:
    """`max_crop`, which most rules have: its declaration, the rules that look at it, and what shows it."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "kohya_bucket").rglob("*.py"))
    named = [text for text in texts if re.search(r"\bmax_crop\b", text)]
    assert len(named) <= 12
