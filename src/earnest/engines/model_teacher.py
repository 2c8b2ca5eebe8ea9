"""A teacher that is another model in this process, read token by token with the student's ids.

    full logits      z_T of every covered token, cut or padded to the student's vocabulary
    top K            the teacher's K most probable tokens, tail = logsumexp of its other logits (support: teacher)
    at the student's the teacher at the student's K most probable tokens, with the same exact tail (support: student)

Both models must have the same tokenizer: with another one, the same id is another piece of text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from earnest.adapters.files import base_model_of, load_adapter
from earnest.engines import micro, scoring
from earnest.errors import ConfigError, SignalError
from earnest.models import Policy, load
from earnest.models.head import HeadSpec
from earnest.models.loading import Dtype
from earnest.models.protocol import PolicyLike
from earnest.objectives.base import Objective
from earnest.objectives.teacher_term import teacher_support
from earnest.signals.batch import Batch
from earnest.signals.distributions import Distribution, FullLogits, ScoredAt
from earnest.signals.scorer import Scorer, TopKWanted

MOST_BYTES = 2**31
"""The largest size of all logits of a batch, in float32."""
Reads = Literal["student", "feedback"]


@dataclass(frozen=True, eq=False)
class ModelTeacher:
    """Another model. ``support`` and ``top_k`` are those of the terms that read it; ``full``: every logit. ``reads``:
    the student's own prompt for every row, or the feedback-conditioned prompt of rows that have one."""

    kind: ClassVar[str] = "model"

    policy: Policy
    support: str = "full"
    top_k: int = 0
    reads: Reads = "student"
    micro_tokens: int = 8192

    @classmethod
    def load(
        cls,
        student: PolicyLike,
        objective: Objective,
        model: str | None,
        adapter: str | None = None,
        *,
        reads: Reads | None = None,
        dtype: Dtype = "auto",
        micro_tokens: int = 8192,
        say: Callable[[str], None] = lambda _: None,
    ) -> ModelTeacher:
        """Load the model on the student's device. Raises if its tokenizer is not the student's."""
        base = model or (None if adapter is None else base_model_of(Path(adapter)))
        if base is None:
            raise ConfigError(f"teacher.model: is required, because {adapter} does not name its base model.")
        say(f"loading the teacher {base}")
        policy = load(base, device=str(student.device), dtype=dtype, say=say)
        if adapter is not None:
            load_adapter(policy, Path(adapter))
        check_tokenizer(student, policy)
        support, top_k = teacher_support(objective)
        return cls(policy, support, top_k, reads or reads_of(objective), micro_tokens)

    @torch.no_grad()
    def teach(self, engine: Scorer, informed: Batch, own: Batch) -> tuple[Distribution, Float[Tensor, " M"]]:
        """The teacher's distribution and its exact log-probs of the targets, at every active token of ``informed``."""
        vocabulary = engine.policy.head.weight.shape[0]
        head = _cut_head(self.policy.head, vocabulary)
        hidden = self._hidden(informed)
        if self.support == "full":
            if (size := 4 * hidden.shape[0] * vocabulary) > MOST_BYTES:
                raise SignalError(
                    f"teacher: all logits of {hidden.shape[0]} tokens × {vocabulary} need {size / 2**30:.1f} GiB; set "
                    "support: teacher and a top_k on its terms, or take fewer completions per step."
                )
            logits = scoring.all_logits(hidden, head).logits
            if missing := vocabulary - logits.shape[1]:
                # Ids that only the student's padded vocabulary has, and no tokenizer writes, get the smallest logit.
                logits = torch.cat([logits, logits.amin(-1, keepdim=True).expand(-1, missing)], -1)
            exact = logits.log_softmax(-1).gather(-1, informed.token_target[:, None])[:, 0]
            return FullLogits(logits), exact
        exact = scoring.at_ids(hidden, head, informed.token_target[:, None])[:, 0]
        if self.support == "teacher":
            return scoring.top_k(hidden, head, min(self.top_k, head.weight.shape[0])), exact
        student = engine.score(own, TopKWanted(min(self.top_k, vocabulary)))
        assert not isinstance(student, Tensor)
        ids: Tensor = student.ids  # type: ignore[union-attr]  # a TopK was asked for
        at = scoring.at_ids_and_tail(hidden, head, ids)
        return ScoredAt(ids, at.logprobs, at.tail), exact

    def _hidden(self, batch: Batch) -> Float[Tensor, "N d"]:
        """The model's states before each active token."""
        batch = batch.to(self.policy.device)
        width = self.policy.head.weight.shape[1]
        found = torch.empty(batch.active.shape[0], width, dtype=self.policy.dtype, device=batch.device)
        for part in micro.cut(batch, self.micro_tokens):
            rows = part.batch
            found[part.token] = self.policy.hidden(rows.inputs)[rows.row, rows.position]
        return found


def reads_of(objective: Objective) -> Reads:
    """SDPO is defined with a feedback-conditioned teacher; the other terms compare on the student's own prompt."""
    return "feedback" if any(w.term.kind == "sdpo" for w in objective.live()) else "student"


def check_tokenizer(student: PolicyLike, teacher: PolicyLike) -> None:
    """Raise if a token of the student is another token, or none, for the teacher; the first such token is named."""
    ours, theirs = ({i: t for t, i in p.tokenizer.get_vocab().items()} for p in (student, teacher))
    for number in sorted(ours):
        if theirs.get(number) != ours[number]:
            there = f"{theirs[number]!r}" if number in theirs else "no token"
            raise ConfigError(
                f"teacher: {teacher.name} has another tokenizer than {student.name}: token {number} is "
                f"{ours[number]!r} for the student and {there} for the teacher, so its probabilities are of other "
                "texts; take a teacher of the same family."
            )


def _cut_head(head: HeadSpec, vocabulary: int) -> HeadSpec:
    """The head without the rows after the student's vocabulary: model sizes of one family pad it differently."""
    if head.weight.shape[0] <= vocabulary:
        return head
    if not head.plain:
        raise SignalError(
            f"teacher: its adapted head has {head.weight.shape[0]} logits and the student {vocabulary}; merge the "
            "teacher's adapter first."
        )
    module = nn.Linear(head.weight.shape[1], vocabulary, bias=head.bias is not None, device="meta")
    module.weight = nn.Parameter(head.weight[:vocabulary].detach(), requires_grad=False)
    if head.bias is not None:
        module.bias = nn.Parameter(head.bias[:vocabulary].detach(), requires_grad=False)
    return HeadSpec(module, head.softcap, head.scale, tied=False)
