"""Facts about a loss's settings and metrics, declared instead of guessed.

    settings={"beta": Setting(0.04, "weight"), "clip": Setting(0.2, "clip"), "loss": Setting("grpo", modes=("dapo",))}
    metrics={"kl": Metric(low=0.0, weight="beta"), "entropy": Metric(weight="c", raises=True),
             "clipped": Metric(kind="clipped share")}

Where a kind is not declared (a setting is a plain number, a metric is undeclared or has no kind), it is guessed from
usual names (those of metrics: ``frontends/names.py``); a verdict lists these guesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    "inert",  # must not matter: chunk lengths, tile sizes, checkpointing
]
KINDS: tuple[str, ...] = get_args(Kind)
CLIPS = ("clip", "clip high", "bound")
MetricKind = Literal[
    "share",  # of rows or tokens: from 0 to 1
    "clipped share",  # of tokens whose ratio is outside the clip: from 0 to 1, 0 where the policy is the one that sampled
    "accuracy",  # the share of pairs in which the chosen answer is ahead: from 0 to 1
    "margin",  # by how much the chosen answers are ahead, below 0 where the rejected ones are
    "ratio",  # the policy's probability over the sampler's: not below 0, 1 where the policy is the one that sampled
    "kl to the sampler",  # 0 where the policy is the one that sampled; an estimate of it may be below 0
    "kl to the reference",  # 0 where the policy is the reference
    "chosen log-probs",  # of the preferred answers, summed or averaged over a row's tokens: not above 0
    "rejected log-probs",  # … of the others
    "entropy",  # of the policy's distributions, whichever tokens were sampled
]
METRIC_KINDS: tuple[str, ...] = get_args(MetricKind)
VALUES: dict[str | None, tuple[float | None, float | None, float | None]] = {
    "share": (0.0, 1.0, None), "clipped share": (0.0, 1.0, 0.0), "accuracy": (0.0, 1.0, None),
    "ratio": (0.0, None, 1.0), "kl to the sampler": (None, None, 0.0), "chosen log-probs": (None, 0.0, None),
    "rejected log-probs": (None, 0.0, None),
}  # fmt: skip
"""The lowest, the highest and the neutral value of a kind. Every kind is an average, and has to move."""


@dataclass(frozen=True)
class Setting:
    """Of the loss. ``modes``: the other modes of an option, each with a gradient of its own; where not every
    number is legal (a top-k, a number of ranks), the other legal ones. ``twins``: pairs of modes that share a gradient
    by definition; ``pure``: the value that leaves the divergence or the preference alone."""

    value: Any
    kind: Kind = "setting"
    modes: Sequence[Any] = ()
    twins: frozenset[tuple[Any, Any]] = frozenset()
    pure: Any = None


@dataclass(frozen=True)
class Metric:
    """``low`` and ``high``: the range that it cannot leave. ``moves=False`` where it may stay constant. ``neutral``:
    what it is where behaviour = current policy. ``weight``: the setting that weighs the term that it is, or 1.0;
    ``raises=True`` where minimising that term raises it (an entropy bonus). ``kind``: which quantity it is; a kind has
    a range and a neutral value. ``average=False`` where it is a sum, an extreme or a count. ``of``: the two metrics
    that a margin is the difference of, first that of the chosen answers. ``unsure``: which of these facts a front-end
    guessed from names that other quantities have too; rows that depend on them warn."""

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

    @property
    def whole(self) -> Metric:
        """With the facts of its kind, where no others are declared."""
        own = (self.low, self.high, self.neutral, self.average)
        values = zip(own, (*VALUES.get(self.kind, (None,) * 3), self.kind is not None), strict=True)
        low, high, neutral, average = (usual if value is None else value for value, usual in values)
        return replace(self, low=low, high=high, neutral=neutral, average=bool(average))


# The usual names of each kind, and nothing less: smooth_eps, huber_delta, reward_clip and cliprange_value are others.
NAMES: dict[Kind, tuple[str, ...]] = {
    "clip": ("clip", "clip_low", "eps", "epsilon", "epsilon_low", "eps_low", "clip_eps", "clip_epsilon", "clip_range",
             "clip_range_low", "cliprange", "cliprange_low", "eps_clip", "eps_clip_low", "clip_ratio",
             "clip_ratio_low"),
    "clip high": ("clip_high", "epsilon_high", "eps_high", "clip_range_high", "cliprange_high", "eps_clip_high",
                  "clip_ratio_high"),
    "bound": ("delta", "dual_clip", "clip_dual", "clip_ratio_c", "importance_clip"),
    "target": ("gamma", "simpo_gamma", "gamma_beta_ratio", "margin", "target_margin", "offset"),
    "smoothing": ("label_smoothing", "label_smoothing_factor", "smoothing"),
    "mixture": ("alpha", "beta", "jsd_beta", "jsd_alpha"),
}  # fmt: skip


READ_BY: dict[Kind, str] = {
    "clip": "policy gradient", "clip high": "policy gradient", "bound": "policy gradient", "target": "preference",
    "smoothing": "preference", "mixture": "divergence",
}  # fmt: skip
"""The family whose laws read a kind that can be guessed."""


def guessed(settings: Mapping[str, Any]) -> dict[str, Kind]:
    """name -> kind, of settings whose last name (``grpo.clip``) is a usual one and whose value is a float."""
    short = {name: name.lower().rsplit(".", 1)[-1] for name, value in settings.items() if isinstance(value, float)}
    return {name: kind for name, last in short.items() for kind, names in NAMES.items() if last in names}


def declared(settings: Mapping[str, Any]) -> dict[str, Setting]:
    """For a front-end that knows its own names: each setting with the kind of its name."""
    kinds = guessed(settings)
    return {name: Setting(value, kinds.get(name, "setting")) for name, value in settings.items()}
