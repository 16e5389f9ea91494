"""Whether models come from the Hugging Face hub or from what was downloaded before, found out once and at once."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from kohya_bucket.errors import KohyaBucketError

_WAIT = 5.0  # seconds; the loaders themselves would ask six times, for most of a minute


def only_local(name: str) -> bool:
    """Whether a model's loaders stay offline: `name` is a folder, or the hub cannot be reached and has been asked
    for this model before.

    Raises:
        KohyaBucketError: the hub cannot be reached, and nothing of this model is here.
    """
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return True
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        address = hub.constants.ENDPOINT
        if hub.constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        else:
            hub.utils.get_session().head(f"{address}/{name}/resolve/main/config.json", timeout=_WAIT)
            return False
    except ImportError:
        return False
    except Exception as error:  # of whichever library the hub's client is made with
        why = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    files = ("config.json", "vae/config.json")
    if any(isinstance(hub.try_to_load_from_cache(name, file), str) for file in files):
        return True
    raise KohyaBucketError(
        f"{address} cannot be reached ({why}), {name} has not been downloaded here before, and there is no folder of "
        "that name: connect this machine, or give a folder or a .safetensors file"
    )
