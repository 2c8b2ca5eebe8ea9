"""The numbers that several checks are judged by, each with its reason; a number of one law stands beside that law."""

from __future__ import annotations

# The fewest and the most digits with which a measured number is printed beside its limit.
DIGITS = range(2, 18)

# Laws: relative differences of gradients, values or metrics.
NEAR = 0.05  # two computations that agree to first order only: a finite difference, soft clips, a power, a group's mean
ROUNDED = 1e-3  # numbers that are logged in fp32 and summed in another order than the loss
AWAY = -0.5  # a cosine below it points away: regularisers and mask conventions leave it above, a lost sign is at -1
STRONG = 1e3  # times its weight a term is the loss, so that a small weight does not hide it

# The watch: numbers of updates that are looked at.
ENOUGH = 4  # before something that always (or never) happened is reported
MANY = 20  # before what has ended is reported: warm-ups from 0 rise, and a loss scale of 2 ** 16 is down to 1, by then


def beside(value: float, limit: float) -> str:
    """``value`` with its sign, and with as many digits as show on which side of ``limit`` it is."""
    texts = (f"{value:+.{digits}g}" for digits in DIGITS)
    return next((text for text in texts if (float(text) > limit) == (value > limit)), repr(value))
