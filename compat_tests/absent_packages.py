"""Packages that ai-toolkit imports, and never calls to load data: they need not be there."""

import importlib.abc
import importlib.machinery
import sys
import types
from contextlib import suppress
from typing import Any


class Nothing:
    def __init__(self, *_: Any, **__: Any) -> None: ...


class Absent(types.ModuleType):
    """Has whatever is asked of it."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Nothing,), {})


class Absentees(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last to be asked: of a package that no finder knows."""

    missing = frozenset(
        """torchaudio diffusers optimum lycoris k_diffusion controlnet_aux kornia torchao bitsandbytes open_clip lpips
        timm librosa torchcodec peft pytorch_wavelets mutagen invisible_watermark imwatermark prodigyopt gradio oyaml
        pytorch_fid transformers flatten_json tensorboard""".split()  # noqa: SIM905
    )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.missing:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def pass_over_absent() -> None:
    """From now on each of them can be imported, and has whatever is asked of it.

    What is there is imported before: diffusers would take the others for installed.
    """
    for name in ("diffusers.loaders.peft", "diffusers.models.autoencoders.autoencoder_tiny", "transformers"):
        with suppress(ImportError):
            importlib.import_module(name)
    sys.meta_path.append(Absentees())
