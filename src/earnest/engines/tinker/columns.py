"""Which targets a remote pass has at every position, and how the objective's scalars follow from its log-probs.

    columns = the batch's own target(s), then the K ids of each divergence's source          lp [N, C]
    LogProb = lp of the first;   Divergence = known.exact or known.estimate on its columns

The scalars are a graph on ``lp``, so the objective's derivative by ``lp`` is what goes back as weights.
Shapes: N active tokens, M covered ones, C columns, K ids per source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines.vocabulary import known
from earnest.engines.vocabulary.eager import source_entropy
from earnest.engines.vocabulary.plan import check_divergence, check_top_k
from earnest.errors import ObjectiveError, SignalError
from earnest.objectives.needs import Divergence, LogProb, Need, SourceEntropy
from earnest.objectives.view import Field
from earnest.signals.batch import Batch
from earnest.signals.distributions import FullLogits, TopK

Estimator = Literal["exact", "sampled"]


@dataclass(frozen=True, eq=False)
class DivergenceSource:
    """A divergence's source: its top-K at the compared ids (None: only the sampled token is read), what it covers,
    and where its ids stand among the columns."""

    top: TopK | None
    token: Float[Tensor, " M"] | None
    at: Int[Tensor, " M"] | None
    start: int


@dataclass(frozen=True, eq=False)
class Columns:
    """A plan for one batch and its needs."""

    batch: Batch
    needs: tuple[Need, ...]
    targets: Int[Tensor, "N C"]
    own: int
    sources: dict[Divergence, DivergenceSource]
    estimator: Estimator

    def fields(self, lp: Float[Tensor, "N C"]) -> dict[Need, Field]:
        """Every need's field, as a graph on ``lp``."""
        own = lp[:, : self.own]
        logprob = own if self.batch.targets.ndim == 3 else own[:, 0]
        found: dict[Need, Field] = {}
        for need in self.needs:
            if isinstance(need, LogProb):
                found[need] = Field(logprob, None, "logprob [remote]", {})
            elif isinstance(need, Divergence):
                found[need] = self._divergence(need, lp, logprob)
            else:
                assert isinstance(need, SourceEntropy)
                distribution, at, _ = _signal(need, self.batch)
                assert isinstance(distribution, TopK)
                values, ran = source_entropy(distribution, need.temperature)
                found[need] = Field(values, at, f"{ran} [remote]", {})
        return found

    def _divergence(self, need: Divergence, lp: Tensor, logprob: Tensor) -> Field:
        source = self.sources[need]
        covered = lp if source.at is None else lp[source.at]
        if source.top is None:
            ids = None
        else:
            K = source.top.ids.shape[1]
            need, ids = replace(need, top_k=K), covered[:, source.start : source.start + K]
        if self.estimator == "exact":
            assert ids is not None and source.top is not None, "plan() refuses it"
            return known.exact(need, ids, source.top, source.at)
        token = self.batch.token_target if source.at is None else self.batch.token_target[source.at]
        own = logprob if source.at is None else logprob[source.at]
        ours = None
        if ids is not None and source.top is not None:
            values = ids.detach().clamp(max=0)
            ours = TopK(source.top.ids, values, known.tail_of(values))
        source_token = source.token
        if source_token is None:  # the sampled token counts only where it is one of the K
            assert source.top is not None
            hit = source.top.ids == token[:, None]
            source_token = torch.where(hit, source.top.logprobs, 0.0).sum(-1)
        return known.estimate(need, own, known.AtToken.of(token, own, source_token, ours, source.top), source.at)


def plan(
    batch: Batch, needs: Sequence[Need], vocabulary: int, estimator: Estimator, student_top: Callable[[int], TopK]
) -> Columns:
    """Plan the columns; refuse needs that log-probs cannot give. ``student_top(k)`` returns the student's own top K,
    where needed."""
    own = batch.token_target if batch.targets.ndim == 3 else batch.token_target[:, None]
    columns, sources = [own], {}
    width = own.shape[1]
    for need in needs:
        if isinstance(need, LogProb):
            if need.temperature != 1:
                raise ObjectiveError(
                    f"{need}: a remote engine has log-probs at temperature 1 only; sample at temperature 1."
                )
        elif isinstance(need, SourceEntropy):
            if not isinstance(_signal(need, batch)[0], TopK) or need.temperature != 1:
                raise ObjectiveError(
                    f"{need}: a remote engine reads the entropy of a received top-K, at temperature 1."
                )
        elif isinstance(need, Divergence):
            source, ids = _source(need, batch, vocabulary, estimator, student_top, width)
            sources[need] = source
            if ids is not None:
                columns.append(ids)
                width += ids.shape[1]
        else:
            raise ObjectiveError(
                f"{need}: a remote engine answers with log-probs of named tokens, which do not determine this; run "
                "the objective on a LocalEngine, or take the term out."
            )
    if sources and batch.targets.ndim == 3:
        raise SignalError("a divergence reads one target per position; the batch has several.")
    return Columns(batch, tuple(needs), torch.cat(columns, 1), own.shape[1], sources, estimator)


def _signal(need: Divergence | SourceEntropy, batch: Batch) -> tuple[object, Tensor | None, Tensor | None]:
    """(distribution, what it covers, its exact log-probs of the targets)."""
    signal = batch.teacher if need.source == "teacher" else batch.reference
    if signal is None:
        raise SignalError(f"{need}: the batch has no {need.source}; supply one (earnest.engines.tinker).")
    return signal.distribution, signal.at, signal.logprobs


def _source(
    need: Divergence,
    batch: Batch,
    vocabulary: int,
    estimator: Estimator,
    student_top: Callable[[int], TopK],
    start: int,
) -> tuple[DivergenceSource, Int[Tensor, "N K"] | None]:
    distribution, at, token = _signal(need, batch)
    if isinstance(distribution, FullLogits):
        logp = distribution.logits.log_softmax(-1)
        targets = batch.token_target if at is None else batch.token_target[at]
        token = logp.gather(-1, targets[:, None])[:, 0] if token is None else token
        if need.support != "full":
            check_divergence(need, distribution, vocabulary)

            def own(k: int) -> Tensor:
                ids = student_top(k).ids
                return ids if at is None else ids[at]

            distribution = known.cut_logits(need, logp, own)
    if need.support == "full" and estimator == "sampled":
        if token is None:
            raise SignalError(
                f"{need}: in its sampled form it needs the source's exact log-probs of the sampled tokens "
                "(Teacher.logprobs)."
            )
        return DivergenceSource(None, token, at, start), None
    if not isinstance(distribution, TopK):
        raise ObjectiveError(
            f"{need}: a remote engine has log-probs of named tokens only, not {type(distribution).__name__}; take "
            "support='teacher' or 'student' on a received top-K, or estimator='sampled'."
        )
    check_top_k(need, distribution, vocabulary)
    check_divergence(need, distribution, vocabulary)
    top = known.cut(distribution, need.top_k)
    ids = top.ids
    if at is not None:
        ids = torch.zeros(batch.active.shape[0], top.ids.shape[1], dtype=torch.long)
        ids[at] = top.ids
    return DivergenceSource(top, token, at, start), ids
