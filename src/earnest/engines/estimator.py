"""``LocalEngine(estimator="sampled")``: divergences as an engine without logits computes them.

Every divergence is estimated at the sampled token (``vocabulary.known``). It exists for comparison: the exact form
costs the same on this machine. All other scalars are computed as usual.
Shapes: N active tokens, M covered ones, d width.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines import scoring
from earnest.engines.vocabulary import known, scalars
from earnest.errors import ObjectiveError, SignalError
from earnest.models.policy import HeadSpec
from earnest.objectives.base import Objective
from earnest.objectives.needs import Divergence, LogProb, Need
from earnest.objectives.view import Field
from earnest.signals.batch import Batch
from earnest.signals.distributions import FullLogits, Hidden, ScoredAt, TopK


def fields(hidden: Float[Tensor, "N d"], head: HeadSpec, batch: Batch, needs: Sequence[Need]) -> dict[Need, Field]:
    """Every need's field; divergences in their sampled form."""
    divergences = [n for n in needs if isinstance(n, Divergence)]
    others = [n for n in needs if not isinstance(n, Divergence)]
    if not divergences:
        return dict(scalars(hidden, head, batch, needs))
    if batch.targets.ndim == 3:
        raise SignalError("the sampled form reads one target per position; the batch has several.")
    own = LogProb()
    found = dict(scalars(hidden, head, batch, [*others, *([] if own in others else [own])]))
    for need in divergences:
        found[need] = _estimate(need, found[own].values, hidden.detach(), head, batch)
    return {need: found[need] for need in needs}


def check_terms(objective: Objective, temperature: float) -> None:
    """Raise if the sampled form of a term's divergence has another expected gradient than the exact form."""
    for weighted in objective.live():
        term = weighted.term
        if not term.signals() & {"teacher", "reference.distribution"}:
            continue
        if temperature != 1:
            raise ObjectiveError(
                f"{term.label}: tokens sampled at temperature {temperature:g} are not samples of the policy at "
                "temperature 1, so the sampled estimate of its divergence is biased; sample at temperature 1, or take "
                "estimator='exact'."
            )
        if (reason := term.only_exact()) is not None:
            raise ObjectiveError(f"{term.label}: {reason}; or take estimator='exact'.")


def demand_ratio(
    batch: Batch, objective: Objective, state: Mapping[str, Mapping[str, Any]], version: int, idle: Container[str] = ()
) -> None:
    """Raise if tokens of another policy meet a term without a ratio: there the sampled form is biased."""
    check_terms(objective, batch.temperature)
    if bool((batch.policy_version == version).all()):
        return
    for weighted in objective.live():
        term = weighted.term
        if term.label in idle:
            continue
        reads = any(isinstance(n, Divergence) for n in term.needs(batch, state.get(term.label, {})))
        if reads and "behaviour" not in term.signals():
            raise ObjectiveError(
                f"{term.label}: the batch was sampled at version {sorted(set(batch.policy_version.tolist()))}, the "
                f"policy is at {version}, and without a ratio the sampled form is biased off-policy; use "
                "SDPO(importance_clip=…), sample anew, or take estimator='exact'."
            )


def _estimate(need: Divergence, logprob: Tensor, hidden: Tensor, head: HeadSpec, batch: Batch) -> Field:
    signal = batch.teacher if need.source == "teacher" else batch.reference
    if signal is None or signal.distribution is None:
        raise SignalError(f"{need}: the batch carries no distribution of the {need.source}; supply one.")
    distribution, at = signal.distribution, signal.at
    token = batch.token_target if at is None else batch.token_target[at]
    own = logprob if at is None else logprob[at]
    states = hidden if at is None else hidden[at]
    source_token = signal.logprobs if signal.logprobs is not None else at_ids(distribution, head, token[:, None])[:, 0]
    if need.support == "full":
        sides = known.AtToken.of(token, own, source_token, None, None)
    else:
        source = supported(need, distribution, head, states)
        need = replace(need, top_k=source.ids.shape[1])
        student = scoring.at_ids(states, head, source.ids)
        ours = TopK(source.ids, student, known.tail_of(student))
        sides = known.AtToken.of(token, own, source_token, ours, source)
    return known.estimate(need, own, sides, at)


def supported(
    need: Divergence, distribution: FullLogits | Hidden | TopK, head: HeadSpec, student: Float[Tensor, "M d"]
) -> TopK:
    """The source at the K ids that are compared, with its tail."""
    if isinstance(distribution, TopK):
        if need.support == "student" and not isinstance(distribution, ScoredAt):
            raise SignalError(f"{need}: a received top-K has the source's own ids, not the student's.")
        return known.cut(distribution, need.top_k)
    if isinstance(distribution, FullLogits):
        logp = distribution.logits.log_softmax(-1)
        return known.cut_logits(need, logp, lambda k: scoring.top_k(student, head, k).ids)
    assert need.top_k is not None, "terms name K for a source that has every logit"
    if need.support == "teacher":
        return scoring.top_k(distribution.states, head, need.top_k)
    ids = scoring.top_k(student, head, need.top_k).ids
    values = at_ids(distribution, head, ids)
    return ScoredAt(ids, values, known.tail_of(values))


def at_ids(distribution: FullLogits | Hidden | TopK, head: HeadSpec, ids: Int[Tensor, "M K"]) -> Float[Tensor, "M K"]:
    """Exact log-probs of a source at these ids; a top-K knows only its own."""
    if isinstance(distribution, Hidden):
        return scoring.at_ids(distribution.states, head, ids)
    if isinstance(distribution, FullLogits):
        return distribution.logits.log_softmax(-1).gather(-1, ids)
    hit = distribution.ids[:, None, :] == ids[:, :, None]  # [M, K, K']
    if not bool(hit.any(-1).all()):
        raise ObjectiveError(
            "the teacher came as a top-K without its exact log-probs of the sampled tokens (Teacher.logprobs), and "
            "some of these are outside the K; supply them. They are never looked up, and never floored."
        )
    return torch.where(hit, distribution.logprobs[:, None, :], 0.0).sum(-1)
