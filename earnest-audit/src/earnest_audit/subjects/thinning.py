"""UNBIASED: The mean of a random thinning is its input, at every setting.

E[f(x)] = x

Needs: fn(x, setting)
How: Many draws of numbers that 16 bits cannot hold; within six standard errors.
Exceptions: Six standard errors of 22 numbers: one false alarm in about twenty million audits.
Detects: PEFT #3152 (DARE's rescaling is computed and discarded), OneTrainer #994 (stochastic rounding that truncates)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.restore import seeded
from earnest_audit.verdict import Finding


@dataclass
class Unbiased:
    """``fn(x, setting)`` thins or rounds x at random; its mean over many draws is x at every setting."""

    fn: Callable[[Tensor, float], Tensor]
    settings: Sequence[float] = (0.3, 0.7)
    draws: int = 2000

    def check(self) -> Iterator[Finding]:
        x = torch.linspace(-2, 3, 11) * 1.0037 + 0.0019  # no dtype of 16 bits holds these
        for setting in self.settings:
            with seeded(0):
                drawn = [self.fn(x.clone(), setting) for _ in range(self.draws)]
            total = torch.stack(drawn).double()
            mean, spread = total.mean(0), total.std(0) / self.draws**0.5
            # Rounding to nearest, where the result has fewer bits than the input, is no bias of the draw.
            grain = torch.finfo(drawn[0].dtype).eps / 2 if drawn[0].is_floating_point() else 0.0
            off = float(((mean - x).abs() / (6 * spread + x.abs() * grain + 1e-6)).max())
            yield LAW.agrees(
                f"mean at {setting}", off, 1.0,
                "The mean is not the input: survivors are not rescaled (a result that is discarded?), or a stochastic "
                "rounding has no noise and truncates.", "{} × six standard errors from the input",
            )  # fmt: skip


LAW = Law("UNBIASED", "thinning (Unbiased)", __doc__, Unbiased.check)
