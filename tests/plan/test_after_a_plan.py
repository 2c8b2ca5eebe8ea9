"""A plan runs adapters on fake tensors. Afterwards the same adapters train in the same process, and the reverse."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from earnest.adapters.linalg import skew


def test_the_places_of_a_skew_block_are_not_shared_between_fake_and_real_tensors() -> None:
    block = 7  # no other test has blocks of this size
    with FakeTensorMode():
        assert skew(torch.ones(2, 21), block).shape == (2, 7, 7)
    real = skew(torch.arange(42.0).view(2, 21), block)
    assert torch.equal(real, -real.mT) and real[0, 0, 1] == 0 and real[0, 0, 2] == 1 and real[1, 5, 6] == 41
    with FakeTensorMode():
        assert skew(torch.ones(2, 21), block).shape == (2, 7, 7)
