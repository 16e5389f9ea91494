"""What musubi-tuner's data sources make of items: `musubi_lists_script.py SPEC.json` with `cases` and `out`.

A case has `class`, `arguments`, and `controls`: how many control images its family takes. The answer is the name of the
error, or [path, caption, control images or clips] of each item.
"""

import json
import sys
from pathlib import Path

from musubi_tuner.dataset import datasources


def items(case):
    source = getattr(datasources, case["class"])(**case["arguments"])
    if "Image" in case["class"]:
        opened = datasources.Image.open
        files = []
        datasources.Image.open = lambda path: files.append(path) or opened(path)
        out = []
        try:
            for i in range(len(source)):
                files.clear()
                path, images, caption, controls = source.get_image_data(i)
                out.append([path, caption, files[len(images) :] if controls is not None else []])
        finally:
            datasources.Image.open = opened
        return out
    source.get_video_data_from_path = lambda path, *_: [path]
    source.get_control_data_from_path = lambda path, *_: [path if Path(path).exists() else 1 / 0]
    found = (source.get_video_data(i) for i in range(len(source)))
    return [[path, caption, control or []] for path, _, caption, control in found]


def answer(case):
    try:
        return items(case)
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(told["out"]).write_text(json.dumps([answer(case) for case in told["cases"]]), encoding="utf-8")
