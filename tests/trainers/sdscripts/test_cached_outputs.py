"""Outputs of text encoders that cannot be read now are not encoded again."""

import errno
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kohya_bucket.errors import UnreadableError
from kohya_bucket.latents.items import Encoding
from kohya_bucket.trainers.sdscripts.caching.text import TextSession
from kohya_bucket.trainers.sdscripts.npz.read_write import text_marks
from tests.faults import PASSING, Faults


class Strategy:
    skip_disk_cache_validity_check = False

    def get_outputs_npz_path(self, image: str) -> str:
        return f"{image}_te.npz"

    def is_disk_cached_outputs_expected(self, path: str) -> bool:
        return True

    def cache_batch_outputs(self, *_: Any) -> None: ...


@pytest.mark.parametrize("unchecked", [False, True])
@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_of_a_folder_that_does_not_answer(tmp_path, monkeypatch, code, unchecked):
    images = {name: SimpleNamespace(absolute_path=str(tmp_path / name), caption="a cat") for name in "ab"}
    strategy = Strategy()
    strategy.skip_disk_cache_validity_check = unchecked
    dataset = cast("Any", SimpleNamespace(image_data=images))
    session = TextSession(dataset, cast("Any", strategy), Encoding(), tmp_path)
    made, missing = session.captions
    np.savez(made, hidden_state1=np.zeros(2), **text_marks("a cat"))
    is_expected = session.methods(lambda _: None)["is_disk_cached_outputs_expected"]
    assert (is_expected(made), is_expected(missing)) == (True, False)
    assert not session.reasons
    faults = Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(1, 100), code), pytest.raises(UnreadableError, match="cannot be read now"):
        is_expected(made)
