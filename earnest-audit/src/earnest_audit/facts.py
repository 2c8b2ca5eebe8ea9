"""Facts about a loss's settings and metrics, declared instead of guessed.

    settings={"beta": Setting(0.04, "weight"), "clip": Setting(0.2, "clip"), "loss": Setting("grpo", modes=("dapo",))}
    metrics={"kl": Metric(low=0.0, weight="beta"), "entropy": Metric(weight="c", raises=True)}

Where a setting is given as a plain number, its kind is guessed from its usual names; a verdict lists these guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
CLIPS = ("clip", "clip high", "bound")


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
    ``raises=True`` where minimising that term raises it (an entropy bonus)."""

    low: float | None = None
    high: float | None = None
    moves: bool = True
    neutral: float | None = None
    weight: str | float | None = None
    raises: bool = False


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


# Of an option's modes: the usual names of each direction.
DIRECTIONS: dict[Kind, tuple[str, ...]] = {
    "forward kl": ("forward_kl", "forward", "fkl", "kl_forward"),
    "reverse kl": ("reverse_kl", "reverse", "rkl", "kl_reverse"),
}  # fmt: skip


READ_BY: dict[Kind, str] = {
    "clip": "policy gradient", "clip high": "policy gradient", "bound": "policy gradient", "target": "preference",
    "smoothing": "preference", "mixture": "divergence", **dict.fromkeys(DIRECTIONS, "divergence"),
}  # fmt: skip
"""The family whose laws read a kind that can be guessed."""


def guessed(settings: Mapping[str, Any]) -> dict[str, Kind]:
    """name -> kind, of settings whose last name (``grpo.clip``) is a usual one and whose value is a float."""
    short = {name: name.lower().rsplit(".", 1)[-1] for name, value in settings.items() if isinstance(value, float)}
    return {name: kind for name, last in short.items() for kind, names in NAMES.items() if last in names}


def sides(keys: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Of names with "chosen" or "rejected" in them: chosen -> rejected where they are alike otherwise, and the rest."""
    named = [k for k in sorted(keys) if "chosen" in k or "rejected" in k]
    pairs = {k: other for k in named if (other := k.replace("chosen", "rejected")) != k and other in named}
    return pairs, [k for k in named if k not in pairs and k not in pairs.values()]


def direction(modes: Iterable[Any]) -> Kind:
    """Of an option's present mode, which comes first, where the modes have the names of both."""
    known = {name: kind for kind, names in DIRECTIONS.items() for name in names}
    named = [known.get(str(mode).lower().replace("-", "_")) for mode in modes]
    return named[0] or "setting" if set(DIRECTIONS) <= set(named) else "setting"


def declared(settings: Mapping[str, Any]) -> dict[str, Setting]:
    """For a front-end that knows its own names: each setting with the kind of its name."""
    kinds = guessed(settings)
    return {name: Setting(value, kinds.get(name, "setting")) for name, value in settings.items()}
