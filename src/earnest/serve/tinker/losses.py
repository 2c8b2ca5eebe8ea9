"""The losses of the Tinker API, as published: earnest's objectives, each as a SUM over the tokens that a datum names.

    cross_entropy          -Σ w·lp                                     lp [N] or [N, K], w of the same shape
    importance_sampling    -Σ ρ·A                                      ρ = exp(lp - q)
    ppo                    -Σ min(ρ·A, clip(ρ, low, high)·A)           bounds of the ratio itself: 0.8, 1.2
    cispo                  -Σ sg[clip(ρ, low, high)]·lp·A              0, 4
    dro                    -Σ [lp·A - ½·β·(lp - q)²]                   β 0.05
    gspo                   -Σ min(s·A, clip(s, low, high)·A)           s = sg[exp(mean(lp - q))]·exp(lp - sg[lp])

q are the log-probs of the policy that sampled, A the advantages. gspo (arXiv 2507.18071, the token form) takes the mean
over the datum's tokens where ``sequence_ratio_mask`` is not 0, or over all of them where no mask is given. No other
token is masked: a token with advantage 0 still has dro's quadratic term.
Shapes: N tokens of all datums at hand, K targets per position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.errors import nearest
from earnest.objectives import CISPO, DAPO, LUSPO, SFT, Term
from earnest.objectives.metrics import Metric
from earnest.objectives.needs import LogProb
from earnest.objectives.policy_gradient import RatioGradient
from earnest.objectives.view import Field, View
from earnest.serve.tinker.data import Datum
from earnest.serve.tinker.errors import WireError
from earnest.signals.batch import SUMMED, Batch
from earnest.signals.distributions import check_logprobs

Inputs = Mapping[str, Tensor]
_BOUNDS = ("clip_low_threshold", "clip_high_threshold")
_SIGNALS = {"logprobs": "behaviour", "advantages": "advantages"}
"""The signals of a batch by their names on the wire."""


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(RatioGradient):
    """The ratio without any bound."""

    kind: ClassVar[str] = "importance_sampling"

    def per_token(self, view: View) -> tuple[Float[Tensor, " n"], dict[str, Metric]]:
        return -self.log_ratio(view).exp() * view.advantages, {}


@dataclass(frozen=True, kw_only=True)
class DRO(RatioGradient):
    """Direct reward optimisation (arXiv 2405.19107): a quadratic penalty in place of the ratio."""

    kind: ClassVar[str] = "dro"

    beta: float = 0.05

    def per_token(self, view: View) -> tuple[Float[Tensor, " n"], dict[str, Metric]]:
        return 0.5 * self.beta * self.log_ratio(view) ** 2 - view.logprobs * view.advantages, {}


@dataclass(frozen=True, kw_only=True)
class _Bounded(Term):
    """Bounds of the ratio itself, for all tokens or one per token."""

    clip_low_threshold: float | Float[Tensor, " N"] = 0.8
    clip_high_threshold: float | Float[Tensor, " N"] = 1.2

    def bound(self, view: View, ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        low, high = (torch.as_tensor(getattr(self, b), dtype=ratio.dtype, device=ratio.device) for b in _BOUNDS)
        return ratio.clamp(low[view.index] if low.ndim else low, high[view.index] if high.ndim else high)


@dataclass(frozen=True, kw_only=True)
class PPO(_Bounded, DAPO):
    kind: ClassVar[str] = "ppo"


@dataclass(frozen=True, kw_only=True)
class BoundedCISPO(_Bounded, CISPO):
    clip_low_threshold: float | Float[Tensor, " N"] = 0.0
    clip_high_threshold: float | Float[Tensor, " N"] = 4.0


@dataclass(frozen=True, kw_only=True)
class TokenGSPO(_Bounded, LUSPO):
    """GSPO's token form; LUSPO's normaliser makes it a sum over tokens."""

    kind: ClassVar[str] = "gspo"

    level: str = "token"
    sequence_ratio_mask: Float[Tensor, " N"] | None = None

    def sequence_mean(self, view: View, log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " S"]:
        if self.sequence_ratio_mask is None:
            return super().sequence_mean(view, log_ratio)
        inside = self.sequence_ratio_mask[view.index] != 0
        return view.keep(inside).row_mean(log_ratio[inside])  # every row has a token inside: ``check`` demands it


LOSSES: dict[str, Term] = {
    term.label: term
    for term in (SFT(name="cross_entropy"), ImportanceSampling(), PPO(), BoundedCISPO(), DRO(), TokenGSPO())
}


def _required(loss: Term) -> list[str]:
    """The inputs that a datum must have beside ``target_tokens``."""
    return [name for name, signal in _SIGNALS.items() if signal in loss.signals()]


def _optional(loss: Term) -> list[str]:
    return ["weights"] if loss.many_targets else [n for n in (*_BOUNDS, "sequence_ratio_mask") if hasattr(loss, n)]


def flat_inputs(loss: Term, data: Sequence[Datum]) -> dict[str, Tensor]:
    """The datums' inputs, flat over their tokens. Where only some have an optional one, the others get the configured
    bound, or 1."""
    found = {}
    for name in {name for datum in data for name in datum.inputs} - {"target_tokens"}:
        default = getattr(loss, name, None)
        fill = default if isinstance(default, float) else 1.0
        found[name] = torch.cat(
            [d.inputs.get(name, torch.full(d.targets.shape, fill, dtype=torch.float64)) for d in data]
        )
    return found


def evaluate(loss: Term, batch: Batch, lp: Float[Tensor, "N ..."], inputs: Inputs) -> Float[Tensor, ""]:
    """The loss of the batch's N tokens, on the graph of ``lp``; ``inputs`` are flat over the same tokens."""
    inputs = {name: value.to(lp) for name, value in inputs.items()}
    signals: dict[str, Any] = {signal: inputs[name] for name, signal in _SIGNALS.items() if name in inputs}
    if "weights" in inputs:
        signals["weight"] = batch.weight.index_put((batch.row, batch.position), inputs["weights"].to(batch.weight))
        on = inputs["weights"] != 0
        lp = lp[on if on.ndim == 1 else on.any(-1)]
        if not lp.numel():
            return lp.sum()
    else:
        own: dict[str, Any] = {name: inputs[name] for name in _optional(loss) if name in inputs}
        loss = replace(loss, **own)
    every = torch.ones(lp.shape[0], dtype=torch.bool, device=lp.device)
    view = View.of(replace(batch, **signals), {LogProb(): Field(lp)}, every, SUMMED, {}, loss.label)
    return loss.evaluate(view).loss


def find(name: str) -> Term:
    if name not in LOSSES:
        raise WireError(f"loss_fn is {name!r}: {nearest(name, LOSSES)} This server has {', '.join(sorted(LOSSES))}.")
    return LOSSES[name]


def configured(loss: Term, given: Mapping[str, float | str]) -> Term:
    """The loss with the client's settings; a key that the loss does not read is refused."""
    known = [name for name in (*_BOUNDS, "beta") if hasattr(loss, name)]
    for key, value in given.items():
        if key not in known:
            allowed = f": {nearest(key, known)}" if known else "; it has no settings."
            raise WireError(f"{loss.label}: loss_fn_config has {key!r}, which it does not read{allowed}")
        if isinstance(value, str) or not abs(value) < float("inf"):
            raise WireError(f"{loss.label}: loss_fn_config[{key!r}] is {value!r}; give a finite number.")
    own: dict[str, Any] = {key: float(value) for key, value in given.items()}
    found = replace(loss, **own)
    if isinstance(found, _Bounded) and not 0 <= found.clip_low_threshold <= found.clip_high_threshold:
        raise WireError(
            f"{loss.label}: the ratio is clipped to {found.clip_low_threshold:g} … {found.clip_high_threshold:g}; "
            "give 0 ≤ clip_low_threshold ≤ clip_high_threshold (bounds of the ratio itself, such as 0.8 and 1.2)."
        )
    if isinstance(found, DRO) and found.beta < 0:
        raise WireError(f"dro: beta is {found.beta:g}; it must be 0 or more.")
    return found


def check(loss: Term, inputs: Inputs, given: Mapping[str, float | str], where: str) -> None:
    """Refuse a datum that lacks an input of the loss, or has one that the loss would ignore."""
    targets = inputs.get("target_tokens")
    if targets is None:
        raise WireError(f"{where}: loss_fn_inputs has no 'target_tokens'.")
    if targets.ndim > 1 and not loss.many_targets:
        raise WireError(
            f"{where}: {loss.label} reads one target per position, target_tokens has shape {tuple(targets.shape)}."
        )
    allowed = ("target_tokens", *_required(loss), *_optional(loss))
    for name in _required(loss):
        if name not in inputs:
            raise WireError(f"{where}: {loss.label} needs loss_fn_inputs[{name!r}], the datum has {sorted(inputs)}.")
    for name, value in inputs.items():
        if name not in allowed:
            raise WireError(
                f"{where}: {loss.label} does not read loss_fn_inputs[{name!r}] ({nearest(name, allowed)}) Leave it out."
            )
        if value.shape != targets.shape:
            raise WireError(
                f"{where}: loss_fn_inputs[{name!r}] has shape {tuple(value.shape)}, target_tokens "
                f"{tuple(targets.shape)}; they must be equal."
            )
        if not bool(torch.isfinite(value).all()):
            raise WireError(f"{where}: loss_fn_inputs[{name!r}] has values that are not finite.")
        if name in _BOUNDS and name in given:
            raise WireError(f"{where}: {name} comes as an input and in loss_fn_config; give one of them.")
    if "logprobs" in inputs:
        check_logprobs(f"{where}: loss_fn_inputs['logprobs']", inputs["logprobs"])
    mask = inputs.get("sequence_ratio_mask")
    if mask is not None and not bool((mask != 0).any()):
        raise WireError(f"{where}: sequence_ratio_mask is 0 everywhere, so the sequence has no ratio.")
