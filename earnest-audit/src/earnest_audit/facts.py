"""Facts about a loss's settings and metrics, declared instead of guessed.

    settings={"beta": Setting(0.04, "weight"), "clip": Setting(0.2, "clip"), "loss": Setting("grpo", modes=("dapo",))}
    metrics={"kl": Metric(low=0.0, weight="beta"), "outside": Metric(kind="clipped share")}

Where a kind is not declared, a front-end guesses it from usual names (``frontends/names.py``); a verdict lists that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal[
    "setting",  # it matters, and no more is known
    "weight",  # weighs a term; at 0 the term is off
    "clip",  # the clip range of the ratio, below 1 (and above, where there is no other)
    "clip high",  # … above 1
    "bound",  # another bound of the ratio that has no effect at 1: a dual clip, a cap
    "target",  # by how much the preferred answer has to win
    "smoothing",  # the share of pairs whose label is taken to be wrong
    "mixture",  # a mixture's weight, between 0 and 1
    "forward kl",  # an option's present mode is KL(teacher ‖ student)
    "reverse kl",  # … KL(student ‖ teacher)
    "inert",  # must not matter: chunk lengths, tile sizes, checkpointing
]
KINDS: tuple[str, ...] = get_args(Kind)
CLIPS, DIRECTIONS = ("clip", "clip high", "bound"), ("forward kl", "reverse kl")
READ_BY: dict[Kind, str] = {
    "clip": "policy gradient", "clip high": "policy gradient", "bound": "policy gradient", "target": "preference",
    "smoothing": "preference", "mixture": "divergence", "forward kl": "divergence", "reverse kl": "divergence",
}  # fmt: skip
"""The family whose laws read a kind that can be guessed."""
MetricKind = Literal["share", "clipped share", "accuracy", "margin", "ratio", "kl to the sampler",
                     "kl to the reference", "chosen log-probs", "rejected log-probs", "entropy"]  # fmt: skip
VALUES: dict[str, tuple[float | None, float | None, float | None]] = {
    "share": (0.0, 1.0, None),  # of rows or tokens
    "clipped share": (0.0, 1.0, 0.0),  # of tokens whose ratio is outside the clip
    "accuracy": (0.0, 1.0, None),  # the share of pairs in which the chosen answer is ahead
    "margin": (None, None, None),  # by how much the chosen answers are ahead: below 0 where the others are
    "ratio": (0.0, None, 1.0),  # the policy's probability over the sampler's
    "kl to the sampler": (None, None, 0.0),  # or an estimate of it, which may be below 0
    "kl to the reference": (None, None, None),  # or an estimate; 0 where the policy is the reference
    "chosen log-probs": (None, None, None),  # of the preferred answers, summed or averaged over a row's tokens
    "rejected log-probs": (None, None, None),  # … of the others
    "entropy": (None, None, None),  # of the policy's distributions, whichever tokens were sampled
}
"""The lowest, the highest and the neutral value of each kind of metric. Every kind is an average that has to move."""


@dataclass(frozen=True)
class Setting:
    """Of the loss. ``modes``: the other modes of an option, each with a gradient of its own; where not every
    number is legal (a top-k, a number of ranks), the other legal ones. ``twins``: pairs of modes that share a gradient
    by definition; ``pure``: the value that leaves the divergence or the preference alone. ``guessed``: a front-end
    read the kind from the name."""

    value: Any
    kind: Kind = "setting"
    modes: Sequence[Any] = ()
    twins: frozenset[tuple[Any, Any]] = frozenset()
    pure: Any = None
    guessed: bool = False


@dataclass(frozen=True)
class Metric:
    """``low`` and ``high``: the range that it cannot leave. ``moves=False`` where it may stay constant. ``neutral``:
    what it is where behaviour = current policy. ``weight``: the setting that weighs the term that it is, or 1.0;
    ``raises=True`` where minimising that term raises it (an entropy bonus). ``kind``: which quantity it is; what is not
    declared follows from it. ``average=False`` where it is a sum, an extreme or a count. ``of``: the two metrics that a
    margin is the difference of, first that of the chosen answers. ``unsure``: which of these facts a front-end guessed
    from a name that other quantities have too; rows that depend on them warn."""

    low: float | None = None
    high: float | None = None
    moves: bool = True
    neutral: float | None = None
    weight: str | float | None = None
    raises: bool = False
    kind: MetricKind | None = None
    average: bool | None = None
    of: tuple[str, str] | None = None
    unsure: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        usual = (*VALUES[self.kind], True) if self.kind in VALUES else ()
        for name, value in zip(("low", "high", "neutral", "average"), usual, strict=False):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


def sides(keys: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Of names with "chosen" or "rejected" in them: chosen -> rejected where they are alike otherwise, and the rest."""
    named = [k for k in sorted(keys) if "chosen" in k or "rejected" in k]
    pairs = {k: other for k in named if (other := k.replace("chosen", "rejected")) != k and other in named}
    return pairs, [k for k in named if k not in pairs and k not in pairs.values()]
