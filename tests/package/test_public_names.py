"""What programs may rely on: the names of `kohya_bucket`, how they are called, and that their examples run.

`public_interface.txt` holds them as they are; after a change that is meant, `python -m tests.package.test_public_names`
writes it again.
"""

import ast
import doctest
import inspect
import re
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kohya_bucket
from tests.pictures import make_pictures

SNAPSHOT = Path(__file__).with_name("public_interface.txt")
_SPECIAL = ("__contains__", "__getitem__", "__iter__", "__len__")
# What an example needs beside the core.
_NEEDS = {
    **dict.fromkeys(
        ("BucketBatchSampler", "BucketedDataset", "ResumeError", "StreamingBuckets", "VAEEncoder", "bucketed_loader"),
        ("torch",),
    ),
    **dict.fromkeys(("BucketedLatentDataset", "LatentStoreError", "precompute_latents"), ("torch", "pyarrow")),
    **dict.fromkeys(("dataset_from_shards", "stream_from_shards"), ("torch", "webdataset")),
    "prepare_loader": ("torch", "accelerate"),
}
_CONFIG = """
[general]
enable_bucket = true
[[datasets]]
resolution = 512
batch_size = 2
  [[datasets.subsets]]
  image_dir = "photos"
  caption_extension = ".txt"
"""


def _signature(called: Any) -> str:
    """Parameters and defaults, without types, which a type checker compares."""
    signature = inspect.signature(called)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    bare = [one.replace(default=sorted(one.default)) if isinstance(one.default, frozenset) else one for one in bare]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _attributes(cls: type) -> Iterator[str]:
    own = [base for base in reversed(cls.__mro__) if base.__module__.startswith("kohya_bucket.")]
    found: dict[str, str] = {}
    for base in own:
        source = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base))))
        stored = (node for node in source if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
        found |= {node.attr: "" for node in stored if ast.unparse(node.value) == "self"}
        for name, value in vars(base).items():
            called = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            found[name] = _signature(called) if inspect.isfunction(called) else ""
    for name in sorted(found):
        if name in _SPECIAL or not name.startswith("_"):
            yield f"    .{name}{found[name]}"


def interface() -> str:
    """Every public name: functions with their parameters, classes with their attributes."""
    lines = []
    for name in kohya_bucket.__all__:
        value = getattr(kohya_bucket, name)
        if not inspect.isclass(value):
            lines.append(f"{name}{_signature(value)}")
        elif issubclass(value, Exception):
            lines.append(f"{name}: {' < '.join(base.__name__ for base in value.__mro__[1:-2])}")
        else:
            made = "" if getattr(value, "_is_protocol", False) else _signature(value)
            lines += [f"{name}{made}", *_attributes(value)]
    return "\n".join(lines) + "\n"


def test_the_interface_is_the_one_written_down() -> None:
    assert interface().splitlines() == SNAPSHOT.read_text(encoding="utf-8").splitlines(), __doc__


@pytest.mark.long
def test_no_name_imports_what_only_the_command_line_needs() -> None:
    code = "import sys\nfrom kohya_bucket import *\nprint({'typer', 'rich'} & sys.modules.keys() or 'neither')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "neither"


@pytest.fixture
def _photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the current folder: images with captions in `photos/`, the same in shards, and a dataset config."""
    make_pictures(tmp_path / "photos", [(640, 480)] * 4 + [(480, 640)] * 2, "a photo")
    (tmp_path / "dataset.toml").write_text(_CONFIG, encoding="utf-8")
    for shard in range(2):
        with tarfile.open(tmp_path / f"photos-{shard:03}.tar", "w") as tar:
            for i in range(3 * shard, 3 * shard + 3):
                for ending in ("png", "txt"):
                    tar.add(tmp_path / "photos" / f"{i}.{ending}", f"{i}.{ending}")
    monkeypatch.chdir(tmp_path)


class _Vae:
    downsample_factor, latent_channels, scale_factor = 8, 3, 1.0

    def encode(self, pixels: Any) -> Any:
        from torch.nn.functional import avg_pool2d

        return avg_pool2d(pixels, 8)


@pytest.mark.long
@pytest.mark.usefixtures("_photos")
@pytest.mark.parametrize("name", kohya_bucket.__all__)
def test_the_example_runs(name: str) -> None:
    for package in _NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"the example of {name} needs {package}")
    if name == "BucketedLatentDataset":
        dataset = kohya_bucket.BucketedDataset.from_folder("photos", kohya_bucket.KohyaBuckets.for_arch("sd"))
        kohya_bucket.precompute_latents(dataset, _Vae(), "latents")
    known: dict[str, Any] = {"vae": _Vae()}
    text = inspect.getdoc(getattr(kohya_bucket, name)) or ""
    for public in re.findall(r"\b\w+\b", text):
        if public in kohya_bucket.__all__ and public not in known:
            known[public] = getattr(kohya_bucket, public)
    example = doctest.DocTestParser().get_doctest(text, known, name, None, None)
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append)
    assert result.attempted
    assert not result.failed, "".join(told)


if __name__ == "__main__":
    SNAPSHOT.write_text(interface(), encoding="utf-8")
