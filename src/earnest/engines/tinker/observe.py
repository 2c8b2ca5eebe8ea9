"""Rollouts with a teacher's log-probs of them, as samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from earnest.engines.tinker.samples import RemoteSample, ScalarSample, TopKSample
from earnest.engines.tinker.teachers import AnyTeacher
from earnest.errors import SignalError
from earnest.rollouts.rollout import Rollout
from earnest.signals.batch import Batch
from earnest.signals.distributions import TopK
from earnest.signals.scorer import AtIdsWanted, TopKWanted

if TYPE_CHECKING:
    from earnest.engines.tinker.engine import TinkerEngine


def observe(
    engine: TinkerEngine,
    rollouts: Sequence[Rollout],
    prompts: Sequence[Sequence[int]] | None,
    teacher: AnyTeacher,
    top_k: int,
    support: Literal["student", "teacher"],
) -> list[RemoteSample]:
    if not rollouts:
        raise SignalError("there are no rollouts to observe.")
    if prompts is not None and len(prompts) != len(rollouts):
        raise SignalError(
            f"need a feedback-conditioned prompt for each of {len(rollouts)} rollouts, got {len(prompts)}."
        )
    if top_k < 0 or support not in ("student", "teacher"):
        raise SignalError(f"top_k is {top_k} and support {support!r}; give K ≥ 0 and 'student' or 'teacher'.")
    if any(r.temperature != 1 for r in rollouts):
        raise SignalError("the rollouts were sampled at another temperature than 1; a remote teacher scores at 1.")
    own = Batch.from_rows([r.prompt for r in rollouts], [r.tokens for r in rollouts])
    theirs = own if prompts is None else Batch.from_rows(prompts, [r.tokens for r in rollouts])
    exact = teacher.logprobs(engine, theirs)
    sizes = [len(r.tokens) for r in rollouts]
    if top_k == 0:
        return [ScalarSample(**_common(r, lp, teacher)) for r, lp in zip(rollouts, exact.split(sizes), strict=True)]
    if support == "student":
        student = engine.score(own, TopKWanted(top_k))
        assert isinstance(student, TopK)
        ids, ours, yours = student.ids, student.logprobs, teacher.at(engine, theirs, student.ids)
    else:
        top = teacher.top(engine, theirs, top_k)
        scored = engine.score(own, AtIdsWanted(top.ids))
        assert isinstance(scored, Tensor)
        ids, ours, yours = top.ids, scored, top.logprobs
    parts = zip(rollouts, *(t.split(sizes) for t in (exact, ids, ours, yours)), strict=True)
    return [
        TopKSample(
            **_common(r, lp, teacher),
            support=support,
            ids=i,
            student_top=s.clamp(max=0),
            teacher_top=t.clamp(max=0),
        )
        for r, lp, i, s, t in parts
    ]


def _common(rollout: Rollout, exact: torch.Tensor, teacher: AnyTeacher) -> dict[str, Any]:
    return {
        "prompt": rollout.prompt,
        "tokens": rollout.tokens,
        "logprobs": rollout.logprobs,
        "teacher": tuple(exact.clamp(max=0).tolist()),
        "teacher_kind": teacher.kind,
        "group": rollout.prompt_index,
        "policy_version": rollout.policy_version,
    }
