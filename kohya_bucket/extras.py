"""What installs a package that is missing: the one place that words it, so that every message names what works.

And names of a package that are imported when they are first used.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# extra: the packages that it brings, and what for
EXTRAS = {
    "torch": (("torch",), "datasets and samplers for a loop of your own"),
    "train": (("accelerate", "diffusers", "safetensors"), "encoding latents"),
    "pixels": (("simplejpeg",), "JPEG decoded in half the time"),
    "parquet": (("pyarrow",), "keeping image sizes between runs, and latents in shards"),
    "hf": (("datasets",), "Hugging Face datasets"),
    "webdataset": (("webdataset",), "tar shards"),
    "ray": (("ray",), "scans and encoding on Ray"),
    "remote": (("fsspec",), "images in object storage"),
    "s3": (("s3fs",), "stores of latents in S3"),
    "video": (("av",), "frames, sizes and rates of clips"),
    "yaml": (("pyyaml",), "jobs of ai-toolkit"),
}

OPENCV = "pip install opencv-python-headless"
"""Of four packages that overwrite each other, and of which an environment with a trainer has one: else `torch` and all
extras with it bring this one."""


def pip_install(extra: str) -> str:
    """The command that installs what `extra` brings.

    It names the packages and not the extra: that works however this package was installed.
    """
    return f"pip install {' '.join(EXTRAS[extra][0])}"


def where_this_came_from() -> str:
    """What to give `pip install` in another environment: the folder, file or address that this package came from.

    Only an installation from a package index is asked for by its name.
    """
    import json  # here, since every import of the package reads this file: these take 30 ms
    from importlib import metadata
    from urllib.request import url2pathname

    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return argument(checkout)
    try:
        origin = json.loads(metadata.distribution("kohya-bucket").read_text("direct_url.json") or "{}")
        url, commit = str(origin.get("url", "")), origin.get("vcs_info", {}).get("commit_id")
    except (metadata.PackageNotFoundError, AttributeError, ValueError):
        return "kohya-bucket"
    if url.startswith("file:"):
        return argument(url2pathname(url.removeprefix("file://")))
    return f"git+{url}@{commit}" if commit else url or "kohya-bucket"


def argument(path: object) -> str:
    """A path in a command that is to be copied into a terminal: in quotes if need be."""
    import shlex
    import subprocess

    return subprocess.list2cmdline([str(path)]) if os.name == "nt" else shlex.quote(str(path))


_EXTRA_OF = {"kohya_bucket.datasets": "torch", "kohya_bucket.latents": "train"}


def importer(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A `__getattr__` for the module `package`, from the names that each module is the home of.

    What it returns raises an ImportError that says what to install where a package of an extra is missing.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as missing:
            extra = next((e for prefix, e in _EXTRA_OF.items() if home.startswith(prefix)), None)
            if extra is None or (missing.name or "").startswith("kohya_bucket"):
                raise
            absent = (missing.name or "").split(".")[0]
            raise ImportError(f"{name} needs {absent}, which is not installed: {pip_install(extra)}") from missing

    return get


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the names that each of its modules is the home of."""
    names_of = {f"{package}.{home}": names.split() for home, names in homes.items()}
    public = sorted(name for names in names_of.values() for name in names)
    return importer(package, names_of), public.copy, public
