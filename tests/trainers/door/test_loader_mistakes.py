"""What PyTorch's loader refuses is named before it is asked."""

from itertools import product

import pytest

from kohya_bucket.checks import LOADER_OPTIONS, loader_mistake

torch = pytest.importorskip("torch")


def refused(given) -> bool:
    """Whether PyTorch takes no such loader, or stops before a worker starts."""
    try:
        loader = torch.utils.data.DataLoader([1, 2, 3], **given)
        if given.get("num_workers", 0) == 0 or given.get("prefetch_factor", 2) == 0 or given["num_workers"] == 1.5:
            list(loader)
    except (ValueError, TypeError, AssertionError):
        return True
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_is_what_pytorch_refuses() -> None:
    for workers, kept, ahead in product((-1, 0, 1, 2, 1.5, "2"), (None, False, True), (None, -1, 0, 1, 2)):
        given = {"num_workers": workers, "persistent_workers": bool(kept), "prefetch_factor": ahead}
        given = {name: value for name, value in given.items() if value is not None}
        wrong = loader_mistake(given, {})
        assert (wrong is not None) == refused(given), given
        assert wrong is None or all(wrong)


def test_it_is_said_in_the_trainers_names() -> None:
    assert loader_mistake({"num_workers": 0, "persistent_workers": True}, LOADER_OPTIONS) == (
        "persistent_data_loader_workers keeps workers, and max_data_loader_n_workers is 0",
        "leave persistent_data_loader_workers out, or set max_data_loader_n_workers to 1 or more",
    )
    assert loader_mistake({}, LOADER_OPTIONS) is None
