"""A trainer of musubi-tuner whose accelerator nobody saw.

So it is with `hv_train_network.py` of versions before April 2026, started by its path: it defines what makes it.
"""

import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("torch.utils.data", reason="the loaders are torch's")

import torch.utils.data as torch_data

from kohya_bucket.adapter.resume import ResumeHooks
from kohya_bucket.musubi.door import MusubiDoor


class Group(list):
    def __init__(self):
        items = [SimpleNamespace(latent_cache_path=f"{i}.safetensors") for i in range(4)]
        manager = SimpleNamespace(batch_size=2, buckets={(64, 64): items}, num_timestep_buckets=None)
        self.datasets = [SimpleNamespace(batch_manager=manager, seed=1)]


@pytest.mark.parametrize("seen", [True, False])
def test_a_run_that_could_not_be_resumed_exactly_says_so(seen, caplog, monkeypatch):
    caplog.set_level("INFO", logger="kohya_bucket")
    monkeypatch.setattr("atexit.register", lambda _: None)
    door = MusubiDoor()
    door.owners, door.resume = SimpleNamespace(named=lambda _: Group), ResumeHooks()
    if seen:
        door.resume.accelerator = SimpleNamespace(step=0)
    collator = SimpleNamespace(current_epoch=SimpleNamespace(value=1))
    signature = inspect.signature(torch_data.DataLoader.__init__)
    planned = door.planned(signature, (Group(),), {"shuffle": True, "collate_fn": collator})
    assert len(planned["sampler"]) == 2
    assert ("a run that is resumed starts its epoch again" in caplog.text) is not seen
