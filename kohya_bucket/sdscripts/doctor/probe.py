"""Put the adapter into a checkout of sd-scripts in a process of its own, and print as JSON how that went.

It imports sd-scripts' data code, so torch too.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

__all__ = ["MARK", "main", "probe"]

MARK = "kohya_bucket probe: "


def probe(folder: str) -> dict[str, Any]:
    """How the adapter fares in the checkout in a folder.

    Returns:
        {"active": bool, "refused": why it refused, "left_alone": {subject: why}, "missing": module that is not
        installed, "error": text}.
    """
    from kohya_bucket.errors import KohyaBucketError
    from kohya_bucket.sdscripts import install, is_active, left_alone, refusal

    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    answer: dict[str, Any] = {"active": False, "refused": "", "left_alone": {}, "missing": "", "error": ""}
    try:
        install(quiet=True)
        for name in ("library.train_util", "library.config_util"):
            importlib.import_module(name)
        answer |= {"active": is_active(), "refused": refusal(), "left_alone": left_alone()}
    except KohyaBucketError as error:
        answer["refused"] = str(error)
    except ModuleNotFoundError as error:
        answer["missing"], answer["error"] = error.name or "", str(error)
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


def main() -> None:
    """The folder is the process's only argument; the answer is a line that begins with `MARK`."""
    print(MARK + json.dumps(probe(sys.argv[1])), flush=True)
