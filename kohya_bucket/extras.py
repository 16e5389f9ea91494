"""What installs a package that is missing: the one place that words it, so that every message names what works."""

from __future__ import annotations

from pathlib import Path

# extra: the packages that it brings
EXTRAS = {
    "torch": ("torch",),
    "train": ("accelerate", "diffusers", "safetensors"),
    "pixels": ("simplejpeg",),
    "parquet": ("pyarrow",),
    "hf": ("datasets",),
    "xformers": ("xformers",),
    "webdataset": ("webdataset",),
    "ray": ("ray[data]",),
    "remote": ("fsspec",),
    "s3": ("s3fs", "obstore"),
    "video": ("av",),
}
PURPOSES = {
    "torch": "datasets and samplers for a loop of your own",
    "train": "encoding latents",
    "pixels": "JPEG decoded in half the time",
    "parquet": "keeping image sizes between runs, and latents in shards",
    "hf": "Hugging Face datasets",
    "xformers": "xformers' attention in the VAE",
    "webdataset": "tar shards",
    "ray": "scans and encoding on Ray",
    "remote": "images in object storage",
    "s3": "stores of latents in S3",
    "video": "frames, sizes and rates of clips",
}


def pip_install(extra: str) -> str:
    """The command that installs what `extra` brings.

    It names the packages and not the extra: that works however this package was installed. Quotes are double ones,
    which Windows takes too.
    """
    return "pip install " + " ".join(f'"{name}"' if "[" in name else name for name in EXTRAS[extra])


def where_this_came_from() -> str:
    """What to give `pip install` in another environment: the folder, file or address that this package came from.

    Only an installation from a package index is asked for by its name.
    """
    import json  # here, since every import of the package reads this file: these take 30 ms
    from importlib import metadata
    from urllib.request import url2pathname

    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return _quoted(str(checkout))
    try:
        origin = json.loads(metadata.distribution("kohya-bucket").read_text("direct_url.json") or "{}")
        url, commit = str(origin.get("url", "")), origin.get("vcs_info", {}).get("commit_id")
    except (metadata.PackageNotFoundError, AttributeError, ValueError):
        return "kohya-bucket"
    if url.startswith("file:"):
        return _quoted(url2pathname(url.removeprefix("file://")))
    return f"git+{url}@{commit}" if commit else url or "kohya-bucket"


def _quoted(path: str) -> str:
    return f'"{path}"' if " " in path else path
