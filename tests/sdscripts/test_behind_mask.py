"""Models that are tried while captions are cached leave the training's random numbers alone."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the models are torch's")

import torch

from kohya_bucket.sdscripts.caching import behind_mask


class Small(torch.nn.Module):
    """In place of FLUX: attends to no text behind the mask."""

    def __init__(self, _):
        super().__init__()
        self.text = torch.nn.Linear(16, 16)

    def forward(self, img, txt, txt_attention_mask, **_):
        return img + (self.text(txt) * txt_attention_mask[..., None]).sum(dim=1, keepdim=True)


def test_models_are_tried_without_seeding_anything(monkeypatch):
    for name, (model, parameters, _) in behind_mask._MODELS.items():
        module = ModuleType(name)
        setattr(module, model, Small)
        setattr(module, parameters, SimpleNamespace)
        monkeypatch.setitem(sys.modules, f"library.{name}", module)
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    try:
        behind_mask._is_unread.cache_clear()
        assert behind_mask._is_unread()
    finally:
        behind_mask._is_unread.cache_clear()
    assert torch.equal(torch.get_rng_state(), before)
    assert seeded == []
