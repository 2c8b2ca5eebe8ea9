"""The needs of an objective and the sources in a batch, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines.vocabulary.formulas import tail_error_bound
from earnest.engines.vocabulary.support import mass_metrics
from earnest.errors import ObjectiveError, SignalError
from earnest.models.head import HeadSpec
from earnest.objectives.metrics import Max, Metric
from earnest.objectives.needs import DistributionSource, Divergence, Entropy, LogProb, Need, SourceEntropy, SpectralNorm
from earnest.signals.batch import Batch
from earnest.signals.distributions import Distribution, FullLogits, Hidden, ScoredAt, TopK

TokenNeed = LogProb | Entropy | Divergence | SourceEntropy

# A received top-K and its tail must sum to 1 up to the rounding of what a service sends.
MASS_SLACK = 0.05


@dataclass(frozen=True, eq=False)
class Covered:
    """A source's distribution for the tokens ``at`` (None: all)."""

    distribution: Distribution
    at: Int[Tensor, " M"] | None


@dataclass(frozen=True, eq=False)
class Plan:
    """Needs that can be computed from this batch, and the sources that they read."""

    needs: tuple[TokenNeed, ...]
    sources: Mapping[DistributionSource, Covered]

    def at(self, need: TokenNeed) -> Int[Tensor, " M"] | None:
        return self.sources[need.source].at if isinstance(need, Divergence | SourceEntropy) else None

    def metrics(self, need: TokenNeed, student_mass: Tensor | None, teacher_mass: Tensor | None) -> dict[str, Metric]:
        """The mass of both distributions that a top-K support covers, and a bound on a received tail's error."""
        found = mass_metrics(student_mass, teacher_mass)
        if (
            isinstance(need, Divergence)
            and isinstance(top := self.sources[need.source].distribution, TopK)
            and need.tail != "renormalise"
        ):
            inside = torch.isfinite(top.tail)
            if bool(inside.any()):
                found["tail_error_bound"] = Max.of(tail_error_bound(top.logprobs[inside], top.tail[inside]))
        return found


def make(needs: Sequence[Need], batch: Batch, head: HeadSpec, hidden: Float[Tensor, "N d"]) -> Plan:
    """Raise if this pass cannot compute a need exactly; nothing is approximated instead."""
    vocabulary, width = head.weight.shape[0], hidden.shape[1]
    if hidden.shape[0] != batch.active.shape[0]:
        raise SignalError(
            f"{hidden.shape[0]} hidden states for {batch.active.shape[0]} active tokens; give one each, in their order."
        )
    if head.weight.shape[1] != width:
        raise SignalError(
            f"hidden states of width {width} meet a head of width {head.weight.shape[1]}; they belong to two models."
        )
    sources: dict[DistributionSource, Covered] = {}
    kept: list[TokenNeed] = []
    for need in needs:
        if isinstance(need, SpectralNorm):
            raise ObjectiveError(f"{need} is not a per-token scalar; the engine computes it from the adapter.")
        if not 0 < need.temperature < float("inf"):
            raise ObjectiveError(f"{need}: the temperature must be above 0 and finite.")
        if isinstance(need, Divergence | SourceEntropy):
            covered = sources.get(need.source) or _covered(need, batch, vocabulary, width)
            sources[need.source] = covered
            if isinstance(need, Divergence):
                check_divergence(need, covered.distribution, vocabulary)
            elif isinstance(covered.distribution, TopK) and need.temperature != 1:
                raise ObjectiveError(
                    f"{need}: a received top-K has no logits to divide by a temperature; use temperature 1, or a "
                    "source with logits."
                )
        kept.append(need)
    targets = batch.token_target
    if kept and int(targets.max()) >= vocabulary:
        raise SignalError(f"the batch has the target {int(targets.max())}, the vocabulary has {vocabulary} tokens.")
    return Plan(tuple(kept), sources)


def check_trained_head(todo: Plan, batch: Batch) -> None:
    """Raise if hidden states of another policy meet a trained head, which is not that policy's head any more."""
    for source, covered in todo.sources.items():
        signal = batch.teacher if source == "teacher" else batch.reference
        if isinstance(covered.distribution, Hidden) and signal is not None and signal.kind != "live":
            raise SignalError(
                f"the {source} ({signal.kind!r}) comes as hidden states, and the policy's head is trained: "
                "its logits would follow the training. Score it as FullLogits or TopK, "
                "or take the head out of the adapter's targets."
            )


def _covered(need: Divergence | SourceEntropy, batch: Batch, vocabulary: int, width: int) -> Covered:
    signal = batch.teacher if need.source == "teacher" else batch.reference
    distribution = None if signal is None else signal.distribution
    if signal is None or distribution is None:
        raise SignalError(
            f"{need}: the batch carries no distribution of the {need.source}; supply one (earnest.signals)."
        )
    if isinstance(distribution, FullLogits) and distribution.logits.shape[1] != vocabulary:
        raise SignalError(
            f"{need}: the {need.source} has {distribution.logits.shape[1]} logits per token, the policy {vocabulary}; "
            "both need the same vocabulary."
        )
    if isinstance(distribution, Hidden) and distribution.states.shape[1] != width:
        raise SignalError(
            f"{need}: the {need.source}'s states have width {distribution.states.shape[1]}, "
            f"the policy's head takes {width}; "
            "a source with a head of its own comes as FullLogits or TopK."
        )
    if isinstance(distribution, TopK):
        check_top_k(need, distribution, vocabulary)
    return Covered(distribution, signal.at)


def check_top_k(need: Divergence | SourceEntropy, top: TopK, vocabulary: int) -> None:
    K = top.ids.shape[1]
    if not top.ids.numel():
        return
    if int(top.ids.max()) >= vocabulary or int(top.ids.min()) < 0:
        raise SignalError(f"{need}: a top-K id lies outside the policy's vocabulary of {vocabulary} tokens.")
    ordered = top.ids.sort(-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise SignalError(f"{need}: a token has the same id twice among its top {K}.")
    total = torch.cat([top.logprobs, top.tail[:, None]], -1).double().exp().sum(-1)
    worst = total[(total - 1).abs().argmax()]
    if not abs(float(worst) - 1) <= MASS_SLACK:
        raise SignalError(
            f"{need}: the top {K} and the tail have a total mass of {float(worst):.4g}; tail must be log(1 - Σp)."
        )


def check_divergence(need: Divergence, distribution: Distribution, vocabulary: int) -> None:
    if not 0 <= need.alpha <= 1:
        raise ObjectiveError(f"{need}: alpha must lie in 0…1 (0 is KL(T‖S), 1 is KL(S‖T)).")
    if need.blend is not None and not 0 <= need.blend <= 1:
        raise ObjectiveError(f"{need}: blend must lie in 0…1 (1 is the source alone).")
    if need.support == "full":
        if need.top_k is not None:
            raise ObjectiveError(
                f"{need}: support 'full' compares all tokens; choose support 'student' or 'teacher' for a top-K."
            )
        if isinstance(distribution, TopK) and distribution.ids.shape[1] < vocabulary:
            raise SignalError(
                f"{need}: the {need.source} sent {distribution.ids.shape[1]} of {vocabulary} log-probs; "
                "ask for support='teacher', or supply Hidden or FullLogits."
            )
        return
    if need.tail == "unnormalised" and need.alpha != 1:
        raise ObjectiveError(f"{need}: tail 'unnormalised' is defined for the reverse KL; set alpha to 1.")
    if not isinstance(distribution, TopK):
        if need.top_k is None or need.top_k < 1:
            raise ObjectiveError(f"{need}: support {need.support!r} needs top_k of 1 or more.")
        return
    K = distribution.ids.shape[1]
    if need.support == "student" and not isinstance(distribution, ScoredAt) and vocabulary > K:
        raise SignalError(
            f"{need}: a received top-K has the {need.source}'s own ids, not the student's; "
            "supply Hidden or FullLogits, "
            "score the source at the student's ids (ScoredAt), or ask for support='teacher'."
        )
    if need.top_k is not None and not 1 <= need.top_k <= K:
        raise SignalError(f"{need}: top_k is {need.top_k}, the {need.source} sent {K} log-probs per token; give 1…{K}.")
    if need.support == "student" and need.top_k not in (None, K) and vocabulary > K:
        raise SignalError(f"{need}: the {need.source} was scored at {K} of the student's ids; top_k must be {K}.")
    if need.temperature != 1 and need.tail != "renormalise" and vocabulary > K:
        raise ObjectiveError(
            f"{need}: a received top-K has no logits for a tail at another temperature; use temperature 1 or "
            "tail='renormalise'."
        )
