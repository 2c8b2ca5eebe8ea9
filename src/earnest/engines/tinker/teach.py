"""A teacher's signal on a batch of a run, asked of samplers elsewhere.

What is asked for follows from the terms that read it: exact log-probs of the sampled tokens always; the teacher's top
K, or the teacher at the student's, where a term compares on K tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from earnest.engines.base import TopKWanted
from earnest.engines.tinker.teachers import AnyTeacher
from earnest.engines.vocabulary.known import tail_of
from earnest.errors import ConfigError
from earnest.objectives.base import Objective
from earnest.objectives.teacher_term import DEFAULT_TOP_K, TeacherTerm
from earnest.signals.batch import Batch, Teacher
from earnest.signals.distributions import ScoredAt, TopK
from earnest.signals.teachers import _tokens, _told_rows

if TYPE_CHECKING:
    from earnest.engines.tinker.engine import TinkerEngine


@dataclass(frozen=True)
class Teaching:
    """A teacher, and what the objective wants to know of it. ``top_k`` 0: the sampled tokens only."""

    teacher: AnyTeacher
    support: str = "full"
    top_k: int = 0

    @property
    def kind(self) -> str:
        return self.teacher.kind

    @classmethod
    def of(cls, teacher: AnyTeacher, objective: Objective) -> Teaching:
        """What the live terms ask for; a batch carries one teacher, so they must agree."""
        wanted = {
            (t.support, 0 if t.support == "full" else t.top_k or DEFAULT_TOP_K)
            for w in objective.live()
            if isinstance(t := w.term, TeacherTerm)
        }
        if len(wanted) > 1:
            raise ConfigError(
                f"objective: its terms compare with the teacher on {sorted(wanted)}; a remote teacher is asked once, "
                "so give them the same support and top_k."
            )
        return cls(teacher, *next(iter(wanted), ("full", 0)))

    @torch.no_grad()
    def teach(self, engine: TinkerEngine, batch: Batch, told: Sequence[Sequence[int] | None]) -> Batch:
        """The batch with a teacher on the rows that have a told prompt; none of them: it covers nothing."""
        rows = [r for r, prompt in enumerate(told) if prompt is not None]
        if not rows:
            nothing = TopK(
                torch.zeros(0, max(1, self.top_k), dtype=torch.long), torch.zeros(0, max(1, self.top_k)), torch.zeros(0)
            )
            return batch.with_signals(teacher=Teacher(nothing, torch.zeros(0, dtype=torch.long), self.kind))
        at = torch.cat([_tokens(batch, r) for r in rows])
        informed = _told_rows(batch, rows, [told[r] or () for r in rows])
        exact = self.teacher.logprobs(engine, informed)
        found = self._distribution(engine, batch.rows(rows), informed, exact)
        return batch.with_signals(teacher=Teacher(found, at, self.kind, exact))

    def _distribution(self, engine: TinkerEngine, own: Batch, informed: Batch, exact: torch.Tensor) -> TopK:
        if self.support == "full":  # what is known is known at the sampled token
            return TopK(own.token_target[:, None], exact[:, None], tail_of(exact[:, None]).float())
        if self.support == "teacher":
            return self.teacher.top(engine, informed, self.top_k)
        student = engine.score(own, TopKWanted(self.top_k))
        assert isinstance(student, TopK)
        values = self.teacher.at(engine, informed, student.ids).clamp(max=0)
        return ScoredAt(student.ids, values, tail_of(values).float())
