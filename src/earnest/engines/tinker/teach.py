"""A teacher on a Tinker service, for the batches of a run.

What it scores follows from the terms that read it: exact log-probs of the sampled tokens always; the teacher's
top K, or the teacher at the student's, where a term compares on K tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from earnest.engines.tinker.engine import TinkerEngine
from earnest.engines.tinker.teachers import AnyTeacher
from earnest.engines.vocabulary.known import tail_of
from earnest.errors import ConfigError
from earnest.objectives.base import Objective
from earnest.objectives.teacher_term import supports
from earnest.signals.batch import Batch
from earnest.signals.distributions import ScoredAt, TopK
from earnest.signals.scorer import Scorer


@dataclass(frozen=True)
class Teaching:
    """A service's teacher with the support that the objective compares on. ``top_k`` 0: the sampled tokens only."""

    service: TinkerEngine
    teacher: AnyTeacher
    support: str = "full"
    top_k: int = 0

    @property
    def kind(self) -> str:
        return self.teacher.kind

    @classmethod
    def of(cls, service: TinkerEngine, teacher: AnyTeacher, objective: Objective) -> Teaching:
        """The support that the live terms read; a batch has one teacher, so they must agree."""
        wanted = supports(objective)
        if len(wanted) > 1:
            raise ConfigError(
                f"objective: its terms compare with the teacher on {sorted(wanted)}; a remote teacher scores once, "
                "so give them the same support and top_k."
            )
        return cls(service, teacher, *next(iter(wanted), ("full", 0)))

    def teach(self, engine: Scorer, informed: Batch, own: Batch) -> tuple[TopK, Tensor]:
        exact = self.teacher.logprobs(self.service, informed)
        return self._distribution(informed, own, exact), exact

    def _distribution(self, informed: Batch, own: Batch, exact: Tensor) -> TopK:
        if self.support == "full":  # only the sampled token's log-prob is known
            return TopK(own.token_target[:, None], exact[:, None], tail_of(exact[:, None]).float())
        if self.support == "teacher":
            return self.teacher.top(self.service, informed, self.top_k)
        ids = self.service.top_k(own, self.top_k).ids
        values = self.teacher.at(self.service, informed, ids).clamp(max=0)
        return ScoredAt(ids, values, tail_of(values).float())
