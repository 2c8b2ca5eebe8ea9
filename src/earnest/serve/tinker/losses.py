"""The losses of the Tinker API, as published: every one is a SUM over the tokens that a datum names.

    cross_entropy          -Σ w·lp                                     lp [N] or [N, K], w of the same shape
    importance_sampling    -Σ ρ·A                                      ρ = exp(lp - q)
    ppo                    -Σ min(ρ·A, clip(ρ, low, high)·A)           bounds of the ratio itself: 0.8, 1.2
    cispo                  -Σ sg[clip(ρ, low, high)]·lp·A              0, 4
    dro                    -Σ [lp·A - ½·β·(lp - q)²]                   β 0.05
    gspo                   -Σ min(s·A, clip(s, low, high)·A)           s = sg[exp(mean(lp - q))]·exp(lp - sg[lp])

q are the log-probs of the policy that sampled, A the advantages. gspo (arXiv 2507.18071, the token form) takes the mean
over the datum's tokens where ``sequence_ratio_mask`` is not 0, all of them without one. Nothing is masked besides: a
token with advantage 0 still has dro's quadratic term.
Shapes: N positions of one datum, K targets a position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.errors import nearest
from earnest.serve.tinker.errors import WireError
from earnest.signals.distributions import check_logprobs

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
Formula = Callable[[Tensor, Inputs, Config], Tensor]


@dataclass(frozen=True)
class Loss:
    """``inputs`` are required beside ``target_tokens``; ``config`` has the defaults. ``bounds`` may also come as
    inputs, one a token."""

    name: str
    formula: Formula
    inputs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)
    many_targets: bool = False

    @property
    def bounds(self) -> tuple[str, ...]:
        return tuple(name for name in ("clip_low_threshold", "clip_high_threshold") if name in self.config)


def _cross_entropy(lp: Tensor, inputs: Inputs, _: Config) -> Float[Tensor, ""]:
    return -(inputs["weights"] * lp).sum() if "weights" in inputs else -lp.sum()


def _importance_sampling(lp: Float[Tensor, " N"], inputs: Inputs, _: Config) -> Float[Tensor, ""]:
    return -((lp - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def _clipped(ratio: Float[Tensor, " N"], inputs: Inputs, config: Config) -> Float[Tensor, " N"]:
    low, high = (inputs.get(name, torch.tensor(config[name], dtype=ratio.dtype)) for name in _BOUNDS)
    return ratio.clamp(low, high)


def _surrogate(ratio: Float[Tensor, " N"], inputs: Inputs, config: Config) -> Float[Tensor, ""]:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, config) * advantages).sum()


def _ppo(lp: Float[Tensor, " N"], inputs: Inputs, config: Config) -> Float[Tensor, ""]:
    return _surrogate((lp - inputs["logprobs"]).exp(), inputs, config)


def _cispo(lp: Float[Tensor, " N"], inputs: Inputs, config: Config) -> Float[Tensor, ""]:
    ratio = (lp - inputs["logprobs"]).exp().detach()
    return -(_clipped(ratio, inputs, config) * lp * inputs["advantages"]).sum()


def _dro(lp: Float[Tensor, " N"], inputs: Inputs, config: Config) -> Float[Tensor, ""]:
    return -(lp * inputs["advantages"] - 0.5 * config["beta"] * (lp - inputs["logprobs"]) ** 2).sum()


def _gspo(lp: Float[Tensor, " N"], inputs: Inputs, config: Config) -> Float[Tensor, ""]:
    gap = lp - inputs["logprobs"]
    mask = inputs["sequence_ratio_mask"] != 0 if "sequence_ratio_mask" in inputs else torch.ones_like(lp).bool()
    ratio = gap[mask].mean().exp().detach() * (lp - lp.detach()).exp()
    return _surrogate(ratio, inputs, config)


_BOUNDS = ("clip_low_threshold", "clip_high_threshold")
_SAMPLED = ("logprobs", "advantages")


def _bounds(low: float, high: float) -> dict[str, float]:
    return dict(zip(_BOUNDS, (low, high), strict=True))


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _cross_entropy, optional=("weights",), many_targets=True),
        Loss("importance_sampling", _importance_sampling, _SAMPLED),
        Loss("ppo", _ppo, _SAMPLED, _BOUNDS, _bounds(0.8, 1.2)),
        Loss("cispo", _cispo, _SAMPLED, _BOUNDS, _bounds(0.0, 4.0)),
        Loss("dro", _dro, _SAMPLED, config={"beta": 0.05}),
        Loss("gspo", _gspo, _SAMPLED, ("sequence_ratio_mask", *_BOUNDS), _bounds(0.8, 1.2)),
    )
}


def find(name: str) -> Loss:
    if name not in LOSSES:
        raise WireError(f"loss_fn is {name!r}: {nearest(name, LOSSES)} This server has {', '.join(sorted(LOSSES))}.")
    return LOSSES[name]


def settings(loss: Loss, given: Mapping[str, float | str]) -> dict[str, float]:
    """The defaults with what the client set; a key that the loss does not read is refused."""
    found = dict(loss.config)
    for key, value in given.items():
        if key not in loss.config:
            allowed = f": {nearest(key, loss.config)}" if loss.config else "; it has no settings."
            raise WireError(f"{loss.name}: loss_fn_config has {key!r}, which it does not read{allowed}")
        if isinstance(value, str) or not abs(value) < float("inf"):
            raise WireError(f"{loss.name}: loss_fn_config[{key!r}] is {value!r}; give a finite number.")
        found[key] = float(value)
    if loss.bounds and not 0 <= found[_BOUNDS[0]] <= found[_BOUNDS[1]]:
        raise WireError(
            f"{loss.name}: the ratio is clipped to {found[_BOUNDS[0]]:g} … {found[_BOUNDS[1]]:g}; "
            "give 0 ≤ clip_low_threshold ≤ clip_high_threshold (bounds of the ratio itself, such as 0.8 and 1.2)."
        )
    if loss.name == "dro" and found["beta"] < 0:
        raise WireError(f"dro: beta is {found['beta']:g}; it must be 0 or more.")
    return found


def check(loss: Loss, inputs: Inputs, given: Mapping[str, float | str], where: str) -> None:
    """Refuse a datum that lacks what the loss reads, or brings what it would ignore."""
    targets = inputs.get("target_tokens")
    if targets is None:
        raise WireError(f"{where}: loss_fn_inputs has no 'target_tokens'.")
    if targets.ndim > 1 and not loss.many_targets:
        raise WireError(
            f"{where}: {loss.name} reads one target a position, target_tokens has shape {tuple(targets.shape)}."
        )
    allowed = ("target_tokens", *loss.inputs, *loss.optional)
    for name in loss.inputs:
        if name not in inputs:
            raise WireError(f"{where}: {loss.name} needs loss_fn_inputs[{name!r}], the datum has {sorted(inputs)}.")
    for name, value in inputs.items():
        if name not in allowed:
            raise WireError(
                f"{where}: {loss.name} does not read loss_fn_inputs[{name!r}] ({nearest(name, allowed)}) Leave it out."
            )
        if value.shape != targets.shape:
            raise WireError(
                f"{where}: loss_fn_inputs[{name!r}] has shape {tuple(value.shape)}, target_tokens "
                f"{tuple(targets.shape)}; nothing is broadcast."
            )
        if not bool(torch.isfinite(value).all()):
            raise WireError(f"{where}: loss_fn_inputs[{name!r}] has values that are not finite.")
        if name in loss.bounds and name in given:
            raise WireError(f"{where}: {name} comes as an input and in loss_fn_config; give one of them.")
    if "logprobs" in inputs:
        check_logprobs(f"{where}: loss_fn_inputs['logprobs']", inputs["logprobs"])
    mask = inputs.get("sequence_ratio_mask")
    if mask is not None and not bool((mask != 0).any()):
        raise WireError(f"{where}: sequence_ratio_mask is 0 everywhere, so the sequence has no ratio.")
