"""What is an image's fault, and what is not."""

import numpy as np
import pytest

from kohya_bucket.images.formats import not_loaded
from kohya_bucket.trainers.sdscripts.carried import ResizedSize


def raised(action):
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def test_a_mistake_of_this_package_is_no_images_fault():
    mistake = raised(lambda: ResizedSize((4, 4)).crop_ltrb((2, 2)))  # has no crop
    with pytest.raises(AssertionError):
        not_loaded(mistake)


@pytest.mark.parametrize("action", [lambda: None.shape, lambda: np.zeros(3)["a"], lambda: [][0]])
def test_one_of_other_code_may_be(action):
    assert type(raised(action)).__name__ in not_loaded(raised(action))
