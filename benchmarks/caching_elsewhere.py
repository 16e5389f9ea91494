"""One side of `caching.py` in musubi-tuner or ai-toolkit: seconds that images or captions are cached for.

    MUSUBI_DIR=… PYTHON_OF_MUSUBI benchmarks/caching_elsewhere.py musubi-images alone FOLDER
    AI_TOOLKIT_DIR=… PYTHON_OF_AI_TOOLKIT benchmarks/caching_elsewhere.py aitk-captions launched FOLDER

Their own programs and classes cache the images in FOLDER, with encoders that only take time: 25 ms an image, 20 ms a
caption, whose outputs are those of a T5 of FLUX in bfloat16.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "compat_tests"), str(ROOT)]
SECONDS = {"images": 0.025, "captions": 0.02}


def musubi(what: str, how: str, folder: Path) -> float:
    sys.path.insert(0, os.path.join(os.environ["MUSUBI_DIR"], "src"))
    import musubi_caching_script as script
    import torch

    torch.set_num_threads(1)
    config = folder / f"{what}-{how}.toml"
    config.write_text(
        '[general]\nresolution = [512, 512]\ncaption_extension = ".txt"\nbatch_size = 1\nenable_bucket = true\n'
        f'[[datasets]]\nimage_directory = "{folder}"\ncache_directory = "{folder / "cache"}"\n',
        encoding="utf-8",
    )
    outputs = torch.randn(512, 4096).to(torch.bfloat16)

    def latents(pixels: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS["images"] * len(pixels))
        return script.values_of(pixels)

    def embeds(prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SECONDS["captions"] * len(prompts))
        return torch.stack([outputs] * len(prompts)), torch.ones(len(prompts), 512, dtype=torch.bool)

    script.Vae.encode = lambda _, pixels: SimpleNamespace(mode=lambda: latents(pixels)[:, :, 0])
    script.embeds = embeds
    script.put_models("zi")
    program = str(script.program("latents" if what == "images" else "text", "zi"))
    model = "--vae" if what == "images" else "--text_encoder"
    sys.argv = [program, "--dataset_config", str(config), model, "x"]
    start = time.perf_counter()
    if how == "launched":
        from kohya_bucket import launch

        sys.argv = ["launch", *sys.argv]
        launch.main()
    else:
        runpy.run_path(program, run_name="__main__")
    return time.perf_counter() - start


def ai_toolkit(what: str, how: str, folder: Path) -> float:
    from absent_packages import pass_over_absent

    pass_over_absent()
    import ai_toolkit_script as script
    import torch

    torch.set_num_threads(1)
    if how == "launched":
        from kohya_bucket.trainers.ai_toolkit.door import DOOR

        DOOR.open()
    from toolkit.config_modules import DatasetConfig
    from toolkit.data_loader import get_dataloader_from_datasets
    from toolkit.prompt_utils import PromptEmbeds

    outputs = torch.randn(1, 512, 4096).to(torch.bfloat16)

    class Model(script.Model):
        device = device_torch = torch.device("cpu")
        torch_dtype = torch.float32
        has_multiple_control_images = False

        def set_device_state_preset(self, *_: object) -> None: ...

        def restore_device_state(self) -> None: ...

        def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
            time.sleep(SECONDS["images"] * len(pixels))
            return torch.nn.functional.avg_pool2d(pixels, 8).repeat(1, 6, 1, 1)[:, :16]

        def encode_prompt(self, *_: object, **__: object) -> PromptEmbeds:
            time.sleep(SECONDS["captions"])
            return PromptEmbeds([outputs, outputs[:, 0, :768].clone()])

    caching = {"cache_latents_to_disk": True} if what == "images" else {"cache_text_embeddings": True}
    config = DatasetConfig(
        default_caption="x", folder_path=str(folder), resolution=512, num_workers=0, caption_ext="txt", **caching
    )
    start = time.perf_counter()
    get_dataloader_from_datasets([config], 1, Model())
    return time.perf_counter() - start


def main() -> None:
    side, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    trainer, what = side.split("-")
    if how == "encoder":
        start = time.perf_counter()
        for _ in folder.glob("*.txt"):
            time.sleep(SECONDS[what])
        seconds = time.perf_counter() - start
    else:
        seconds = {"musubi": musubi, "aitk": ai_toolkit}[trainer](what, how, folder)
    print(f"\n{seconds}", flush=True)


if __name__ == "__main__":
    main()
