"""Unbiased: thinning and stochastic rounding keep the mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from earnest_audit import (
    Unbiased,
    audit,
)


@pytest.mark.parametrize("noise", [True, False])
def test_stochastic_rounding_without_noise_is_seen(noise: bool) -> None:
    """OneTrainer #994."""

    def rounded(x: Tensor, _: float) -> Tensor:
        bits = x.contiguous().view(torch.int32)
        more = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32) if noise else 0
        return ((bits + more) & -65536).view(torch.float32)

    before = torch.get_rng_state()
    assert audit(Unbiased(rounded)).holds == noise
    assert torch.get_rng_state().equal(before)
