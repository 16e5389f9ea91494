"""Writes docs/api.md from signatures and docstrings: python docs/make_api.py

On GitHub a name has its signature and first line; on the site `site_hooks.py` puts the whole docstring in its place.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

_HEAD = """# Python API

Every public name with its signature; the site has all of each docstring, whose examples run as tests. `import
kohya_bucket` loads neither torch nor pyarrow: names are imported when they are first used. Sizes are (width, height),
arrays of sizes `[N, 2] int32`. `python docs/make_api.py` makes this page. [Your own training loop](tutorial-loop.md)
shows the names together.
"""
_SECTIONS = {
    "Rules": "KohyaBuckets FixedBuckets AutoBuckets ExactBuckets NovelAIBuckets rule_from_name BucketSet list_presets "
    "load_preset Placement",
    "Plans": "plan_epoch EpochPlan planning.PlanOptions planning.Ledger",
    "Datasets and batches": "bucketed_loader BucketedDataset BucketBatchSampler prepare_loader StreamingBuckets "
    "dataset_from_shards stream_from_shards read_sizes images.list_images images.MetadataCache images.MetadataRow "
    "datasets.items.BucketResize",
    "Latents": "precompute_latents trainers.sdscripts.npz.files.NpzFiles VAEEncoder BucketedLatentDataset "
    "latents.LatentStore",
    "Previews for other programs": "preview reports.preview.Preview reports.preview.PreviewBucket "
    "reports.preview.NotTrained",
    "Errors": "KohyaBucketError ConfigError PlanError ResumeError LatentStoreError errors.BucketSettingsError "
    "errors.InvalidBucketError",
    "Buckets and sets": "buckets.BucketRule buckets.Bucket buckets.Reason buckets.generate_buckets "
    "buckets.load_from_toml buckets.load_from_json buckets.bucket_set_to_toml buckets.switching_points "
    "buckets.SwitchingPoint",
}
_MADE_HERE = {
    "AutoBuckets", "EpochPlan", "Ledger", "Placement", "Preview", "PreviewBucket", "NotTrained", "SwitchingPoint",
}  # fmt: skip
_TEXTS = {
    "Previews for other programs": """A graphical program need not compute buckets and steps: `preview` plans a config
by the code that trains it.

```python
import kohya_bucket

found = kohya_bucket.preview("dataset.toml", gpus=2, arch="sdxl")  # or the config as a dict
if found.errors:
    print("the trainer stops:", *found.errors, sep="\\n")
print(found.steps, "steps in an epoch")
for bucket in found.buckets:
    print(bucket.size, bucket.samples, bucket.batches, bucket.files[:3])
for image in found.not_trained:
    print(image.file, image.reason, image.mend)  # e.g. {"bucket_no_upscale": False}
```

`kohya-bucket plan dataset.toml --images --json` prints the same, `found.data` in Python.
`kohya_bucket/cli/plan.schema.json` is its JSON Schema. Neither `preview` nor `plan_epoch` loads typer, rich or
torch; `plan_epoch` needs numpy alone. Keys are added within a `version`; what
would break a reader gets a new one.
""",
}


def page() -> str:
    """The text of docs/api.md."""
    parts = [_HEAD]
    for title, names in _SECTIONS.items():
        parts += [f"## {title}\n", *([_TEXTS[title]] if title in _TEXTS else [])]
        parts += [*(_entry(name) for name in names.split()), ""]
    return "\n".join(parts)


def _entry(name: str) -> str:
    module, _, last = f"kohya_bucket.{name}".rpartition(".")
    public = getattr(importlib.import_module(module), last)
    first = " ".join((inspect.getdoc(public) or "").split("\n\n")[0].split())
    return f"- **`{module}.{last}`**{_parameters(public)}: {first}"


def _parameters(public: Any) -> str:
    """`(a, b=1)`; nothing for errors, enumerations, protocols and what other names return."""
    if (inspect.isclass(public) and issubclass(public, (Exception, Enum))) or getattr(public, "_is_protocol", False):
        return ""
    if getattr(public, "__name__", "") in _MADE_HERE:
        return ""
    try:
        parameters = inspect.signature(public).parameters.values()
    except ValueError:
        return ""
    words = [_word(p) for p in parameters if not p.name.startswith("_")]
    return f" `({', '.join(words)})`" if words else ""


def _word(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    if parameter.default is inspect.Parameter.empty:
        return stars + parameter.name
    default = repr(parameter.default)
    return f"{parameter.name}={default}" if re.fullmatch(r"[\w.'\"-]{1,16}", default) else f"{parameter.name}=…"


if __name__ == "__main__":
    (HERE / "api.md").write_text(page(), encoding="utf-8", newline="\n")
