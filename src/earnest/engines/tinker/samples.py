"""A completion for distillation on a service: one number per token, or K of them.

``match sample.kind`` (or isinstance) distinguishes the two, also for a type checker:

    scalar    exact log-probs of the sampled tokens, under the sampling policy and under the teacher
    topk      the same, and both sides at K ids per token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines.vocabulary.known import tail_of
from earnest.errors import SignalError
from earnest.signals.batch import Batch, Teacher
from earnest.signals.distributions import ScoredAt, TopK


@dataclass(frozen=True, kw_only=True, eq=False)
class ServiceSample:
    """What both kinds have. ``logprobs`` are the exact ones it was sampled with, ``teacher`` the teacher's own."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    teacher: tuple[float, ...]
    teacher_kind: str
    group: int
    policy_version: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalarSample(ServiceSample):
    kind: Literal["scalar"] = "scalar"


@dataclass(frozen=True, kw_only=True, eq=False)
class TopKSample(ServiceSample):
    """``ids`` are the K most probable tokens of the side that ``support`` names. The sampled token need not be among
    them: its exact log-probs are fields of their own."""

    support: Literal["student", "teacher"]
    ids: Int[Tensor, "n K"]
    student_top: Float[Tensor, "n K"]
    teacher_top: Float[Tensor, "n K"]
    kind: Literal["topk"] = "topk"


RemoteSample = ScalarSample | TopKSample


def batch_of(samples: Sequence[RemoteSample]) -> Batch:
    """The samples as one batch with a teacher on every token, behaviour log-probs and policy versions."""
    if not samples or len({s.kind for s in samples}) != 1 or len({s.teacher_kind for s in samples}) != 1:
        raise SignalError("a batch is made of samples of one kind with one teacher, and at least one.")
    batch = Batch.from_rows(
        [s.prompt for s in samples],
        [s.tokens for s in samples],
        group=[s.group for s in samples],
        behaviour=[s.logprobs for s in samples],
        policy_version=[s.policy_version for s in samples],
    )
    exact = torch.tensor([v for s in samples for v in s.teacher])
    return batch.with_signals(
        teacher=Teacher(_distribution(samples, batch, exact), None, samples[0].teacher_kind, exact)
    )


def _distribution(samples: Sequence[RemoteSample], batch: Batch, exact: Float[Tensor, " N"]) -> TopK:
    found: list[TopKSample] = []
    for sample in samples:
        if sample.kind == "scalar":  # only the sampled token's log-prob is known
            return TopK(batch.token_target[:, None], exact[:, None], tail_of(exact[:, None]).float())
        found.append(sample)
    if len({(s.support, s.ids.shape[1]) for s in found}) != 1:
        raise SignalError("samples of one batch have one support and one K.")
    values = torch.cat([s.teacher_top for s in found])
    kind = ScoredAt if found[0].support == "student" else TopK
    return kind(torch.cat([s.ids for s in found]), values, tail_of(values).float())
